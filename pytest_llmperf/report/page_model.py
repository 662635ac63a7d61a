"""Page: what a page of a run shows, as text and figures; how it looks is the template's."""

from __future__ import annotations

from dataclasses import dataclass

#: The verdicts that somebody has to look at, in the order in which a page tells them.
FOR_A_PERSON = ("regressed", "invalid", "new", "inconclusive", "improved", "changed")

#: The part of a row that is its whole bar, by whose figure it is.
NOW, STORED = "this run", "baseline, not run this time"


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_words: int = 1
    """How many of the first columns are words; figures stand to the right."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture and the same as a table, which is what a screen reader and a copy get."""

    title: str
    says: str
    """In a sentence, for whoever does not see it."""
    table: Table
    note: str = ""


@dataclass(frozen=True)
class Row:
    """Parts that add up to a bar, and figures to hold their sum against, both by name."""

    label: str
    words: str
    """The figure for people."""
    parts: tuple[tuple[str, float], ...]
    marks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RowChart(Chart):
    """Bars, plain or divided; the legend has parts and marks in the order of these names."""

    axis: str
    rows: tuple[Row, ...]
    marks: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """As they first appear."""
        return tuple(dict.fromkeys(name for row in self.rows for name, _ in row.parts))


@dataclass(frozen=True)
class Line:
    """Points in order; ``role`` is its colour and its dashes: ``now``, ``baseline``, ``published`` or ``ideal``."""

    name: str
    role: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class LineChart(Chart):
    """Lines over a common axis."""

    x_axis: str
    y_axis: str
    lines: tuple[Line, ...]
    doubles: bool = False
    """Whether each step to the right is twice as much: both axes are logarithms, that begin at the least figures."""


@dataclass(frozen=True)
class Interval:
    """One row: a change, between what it is, and where it would have been called a loss; fractions."""

    label: str
    verdict: str
    words: str
    change: float
    low: float | None
    high: float | None
    limit: float | None


@dataclass(frozen=True, kw_only=True)
class IntervalChart(Chart):
    """Changes beside their limits."""

    intervals: tuple[Interval, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page."""

    anchor: str
    """Its name in the page's addresses."""
    title: str
    charts: tuple[Chart, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """A text of a row, and what it is sorted by: ``None`` sorts by the text."""

    text: str
    order: float | None = None


@dataclass(frozen=True, kw_only=True)
class Details:
    """The tables, lists and charts that a row opens to, by title."""

    tables: tuple[tuple[str, Table], ...] = ()
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table of cases."""

    anchor: str
    name: str
    verdict: str
    reason: str
    cells: tuple[Cell, ...]
    """One for each of ``Page.columns``."""
    commands: tuple[tuple[str, str], ...]
    """What each does, and the command: one that runs the case again, one that accepts its figures."""
    short: str
    """What it opens to where there is no room for more: a line."""
    details: Details


@dataclass(frozen=True, kw_only=True)
class Page:
    """A run, or several."""

    title: str
    runs: tuple[tuple[tuple[str, str], ...], ...] = ()
    """What each was, and where: names and values."""
    warnings: tuple[str, ...] = ()
    """What fails the run or must be known before its figures are read: an end before its end, files left out."""
    remarks: tuple[str, ...] = ()
    """What a verdict does not say where it was reached."""
    columns: tuple[str, ...] = ()
    main: tuple[str, ...] = ()
    """The columns that a phone shows, too."""
    cases: tuple[Case, ...] = ()
    sections: tuple[Section, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    """Cases that were not run, and why."""
    made_by: str = ""
    notes: tuple[str, ...] = ()
    """What stands below: sources, conventions."""

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All that are on it, each once."""
        found = [chart for section in self.sections for chart in section.charts]
        return tuple(dict.fromkeys([*found, *(chart for case in self.cases for chart in case.details.charts)]))

    @property
    def verdicts(self) -> tuple[tuple[str, int], ...]:
        """How many cases have each, those first that somebody has to look at."""
        found = [case.verdict for case in self.cases]
        order = [*FOR_A_PERSON, "pass", *sorted({*found} - {*FOR_A_PERSON, "pass"})]
        return tuple((verdict, found.count(verdict)) for verdict in order if verdict in found)

    @property
    def for_a_person(self) -> tuple[tuple[str, tuple[Case, ...]], ...]:
        """The cases that somebody has to look at, by verdict."""
        groups = ((verdict, tuple(case for case in self.cases if case.verdict == verdict)) for verdict in FOR_A_PERSON)
        return tuple((verdict, cases) for verdict, cases in groups if cases)
