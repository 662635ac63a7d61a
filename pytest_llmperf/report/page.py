"""Page: what a page of a run shows, as text and figures; and as HTML, one file that needs neither network nor a script.

How it looks is the template's; Vega-Lite draws its charts before: ``template/chart.json`` has the specification, but
for a chart's own figures. Colours are CSS variables of the page, so that one picture serves light, dark and paper."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from pytest_llmperf.report.text import leaving
from pytest_llmperf.support import MADE_BY

#: The verdicts that somebody has to look at, in the order in which a page tells them.
FOR_A_PERSON = ("regressed", "invalid", "new", "inconclusive", "improved", "changed")


@dataclass(frozen=True)
class Table:
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_words: int = 1
    """How many of the first columns are words; figures stand to the right."""
    bars: tuple[float, ...] = ()
    """Of each row the bar behind its first figure, as a share of the longest."""


@dataclass(frozen=True)
class Line:
    """Points in order; ``role`` is its colour and its dashes: ``now`` or ``baseline``."""

    name: str
    role: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture of lines over a common axis, and the same as a table, which is what a screen reader and a copy get."""

    title: str
    says: str
    """In a sentence, for whoever does not see it."""
    note: str = ""
    table: Table | None = None
    """``None``: one stands beside it."""
    x_axis: str
    y_axis: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    anchor: str
    title: str
    lines: tuple[str, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    """By title."""
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True)
class Cell:
    """A text of a row, and what it is sorted by: ``None`` sorts by the text."""

    text: str
    order: float | None = None


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
    tables: tuple[tuple[str, Table], ...] = ()
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()
    charts: tuple[Chart, ...] = ()
    """These and the lists and tables, by title, are what it opens to."""


@dataclass(frozen=True, kw_only=True)
class Page:
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
    made_by: str = MADE_BY
    notes: tuple[str, ...] = ()
    """What stands below: sources, conventions."""

    @property
    def charts(self) -> tuple[Chart, ...]:
        found = [chart for section in self.sections for chart in section.charts]
        return tuple(dict.fromkeys([*found, *(chart for case in self.cases for chart in case.charts)]))

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


# The file.

# More are not read at the top.
_MOST_AT_THE_TOP = 30


def html(page: Page) -> str:
    """The whole file; a chart of which no picture could be drawn is told by its table alone."""
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - only a page that is written pays for it
    from markupsafe import Markup  # noqa: PLC0415 - the same

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    # Whatever the template shows, as it may leave: attributes and what is copied too; markup is of our own making.
    environment.finalize = lambda value: leaving(value) if type(value) is str else value
    # Of our own drawing, which escapes the text in it.
    pictures = {chart: Markup(picture) for chart, picture in drawn(page.charts).items()}  # noqa: S704
    environment.filters["picture"] = lambda chart: pictures.get(chart, "")
    template: Any = environment.from_string(_file("page.html.jinja")).module
    script = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style, code = Markup(_file("page.css")), Markup(script)  # noqa: S704 - of ours
    return str(template.page_of(page, style, code, f"sha256-{digest}", most=_MOST_AT_THE_TOP))


def _file(name: str) -> str:
    return (files(__package__) / "template" / name).read_text(encoding="utf-8")


# By the names they are imported by; the extra ``page`` has them.
_NEEDED = {"jinja2": "jinja2", "vl_convert": "vl-convert-python"}


def missing() -> str:
    """Name what a page takes and is not installed, and what installs it, in a line; imports nothing of it."""
    if not (names := [name for module, name in _NEEDED.items() if find_spec(module) is None]):
        return ""
    are = "is" if len(names) == 1 else "are"
    return f"a page takes {' and '.join(names)}, which {are} not installed; pip install 'pytest-llmperf[page]'"


# As wide as a phone shows without shrinking its text much; a desktop sets several beside one another.
_WIDTH = 440
# Figures from here on are told by three digits and a letter.
_LARGE, _THREE_DIGITS = 10_000, ".3~s"

# Three seconds for eighty charts on two cores.
_SECONDS = 120.0
# A process each, of half a second.
_MOST_SINGLY = 40


def specification(chart: Chart) -> dict[str, Any]:
    """The chart for Vega-Lite. The picture says nothing by itself: what it shows is said beside it."""
    spec: dict[str, Any] = json.loads((files(__package__) / "template" / "chart.json").read_text(encoding="utf-8"))
    is_large = any(y >= _LARGE for line in chart.lines for _, y in line.points)
    spec["encoding"]["x"]["axis"]["title"] = chart.x_axis
    spec["encoding"]["y"]["axis"] |= {"title": chart.y_axis, **({"format": _THREE_DIGITS} if is_large else {})}
    lines = enumerate(chart.lines)
    values = [{"line": f"{n}", "role": line.role, "x": x, "y": y} for n, line in lines for x, y in line.points]
    return {**spec, "data": {"values": values}, "width": _WIDTH}


# What only a script would need of them.
_NOISE = re.compile(
    r' (?:role|aria-roledescription|aria-label|aria-hidden|pointer-events|xmlns:xlink|version)="[^"]*"'
    r'|<path class="(?:back|fore)ground"[^>]*?/>| opacity="1"| stroke-width="1"'
)
_HIDDEN_LABEL = re.compile(r'<text [^>]*opacity="0"[^>]*>[^<]*</text>')
_FONT = ' font-family="system-ui, sans-serif"'


def drawn(charts: Sequence[Chart]) -> Mapping[Chart, str]:
    """SVG of each chart; those that could not be drawn are not among them, and no trouble is raised."""
    pictures = svgs([specification(chart) for chart in charts])
    if len(pictures) != len(charts):
        # One of them has ended the process: by itself each of the others has its picture all the same.
        pictures = [next(iter(svgs([specification(chart)])), "") for chart in charts[:_MOST_SINGLY]]
    slim = (_HIDDEN_LABEL.sub("", _NOISE.sub("", picture)).replace(_FONT, "") for picture in pictures)
    return {chart: picture for chart, picture in zip(charts, slim, strict=False) if picture}


# A process of its own, which imports nothing of ours: the library ends its whole process where it finds what it did not
# expect, and that must not be the one that has measured. It looks for no module where the run happens to be.
_DRAWING = """
import sys
sys.path[:] = filter(None, sys.path)
import json, vl_convert
drawn = []
for specification in json.load(sys.stdin):
    try:
        drawn.append(str(vl_convert.vegalite_to_svg(specification)))
    except ValueError:
        drawn.append("")
json.dump(drawn, sys.stdout)
"""


def svgs(specifications: Sequence[object]) -> list[str]:
    """SVG of each of these Vega-Lite specifications, empty where it is none; nothing where the process ended."""
    if not specifications:
        return []
    command, told = [sys.executable, "-c", _DRAWING], json.dumps(specifications)
    try:
        done = subprocess.run(command, input=told, capture_output=True, encoding="utf-8", timeout=_SECONDS, check=True)
        return [str(picture) for picture in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
