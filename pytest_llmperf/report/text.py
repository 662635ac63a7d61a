"""Text that has to fit: one line, a terminal's width, an output's encoding; tables of cases; a launch while it runs."""

from __future__ import annotations

import io
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, RATE, cell, columns, label, measured
from pytest_llmperf.records.result import Check
from pytest_llmperf.records.results_document import Figure
from pytest_llmperf.support import formats
from pytest_llmperf.support.redaction import without_secrets

# Where a line that is too long may break: after a space, then inside an id, then anywhere.
_BREAKS = (r"(?<= )", r"(?<=[-/:=,])")


@dataclass(frozen=True)
class Glyphs:
    """The marks outside ASCII that the reports use, and what stands for them elsewhere."""

    dot: str
    ellipsis: str


UNICODE = Glyphs(dot="·", ellipsis="…")
ASCII = Glyphs(dot="|", ellipsis="...")


def glyphs_of(encoding: str | None) -> Glyphs:
    """The marks that an output of this encoding can show; an unknown encoding shows ASCII."""
    try:
        (UNICODE.dot + UNICODE.ellipsis).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def one_line(text: str, encoding: str | None = "utf-8") -> str:
    """``text`` as it may leave, without line breaks, and escaped where ``encoding`` cannot show it. An id or an
    exception's message must not move the cursor, start a colour or end the run with a UnicodeEncodeError."""
    line = leaving(text).replace("\n", " ").strip()
    try:
        return line.encode(encoding or "ascii", "backslashreplace").decode(encoding or "ascii")
    except LookupError:
        return line.encode("ascii", "backslashreplace").decode("ascii")


def leaving(text: str) -> str:
    """``text`` as it may leave, its lines kept: without secrets, and without what moves a cursor or turns words round.
    Every string that somebody else reads goes through here, or through ``one_line``."""
    text = without_secrets(text)
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def fold(text: str, width: int | None, indent: str = "") -> list[str]:
    """``text`` in lines of at most ``width``, those after the first indented; nothing is lost but spaces at a break."""
    if width is None or len(text) <= width:
        return [text] if text else []
    width = max(width, 1)
    indent = indent if len(indent) < width // 2 else ""
    lines: list[str] = []
    rest = text
    while rest:
        lead = indent if lines else ""
        head = _head(rest, width - len(lead))
        lines.append((lead + head).rstrip())
        rest = rest[len(head) :].lstrip(" ")
    return lines


def _head(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    for pattern in _BREAKS:
        # One more character: the space at the break itself need not fit.
        ends = [match.start() for match in re.finditer(pattern, text[: width + 1])]
        if fitting := [end for end in ends if 0 < len(text[:end].rstrip()) <= width]:
            return text[: fitting[-1]]
    return text[:width]


def shorten_middle(text: str, width: int, ellipsis: str) -> str:
    """``text`` in ``width`` characters, its two ends kept: an id differs at its end as often as at its start."""
    if len(text) <= width:
        return text
    if width <= len(ellipsis) + 1:
        return text[: max(width, 0)]
    kept = width - len(ellipsis)
    tail = kept // 2
    return text[: kept - tail] + ellipsis + (text[-tail:] if tail else "")


# A table gives way to a narrow terminal without losing an id or a figure: the plain table, its ids folded, where that
# fits; else ids on lines of their own above their figures, which are folded where they have to be.

_GAP = 2
_INDENT = "  "
# An id in a narrower column would be a ribbon.
_NARROWEST_CASE = 20
_STYLES = {"pass": "green", "improved": "cyan", "changed": "cyan"}
_STYLES |= dict.fromkeys(("new", "inconclusive"), "yellow") | dict.fromkeys(("regressed", "invalid"), "red")
# Spaces at the end of a line, also where a colour ends after them.
_TRAILING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")


@dataclass(frozen=True)
class Column:
    """A heading and one cell a case."""

    heading: str
    cells: Sequence[str]
    right: bool = True
    colored: bool = False
    """Whether its cells are verdicts, each in its colour."""

    @property
    def width(self) -> int:
        return max(len(line) for text in (self.heading, *self.cells) for line in text.split("\n"))


class FigureCell(NamedTuple):
    """A figure of one case, in a table of cases."""

    heading: str
    text: str
    value: float | None


def figure_cells(place: str, figure_of: Callable[[str], Figure | Check | None]) -> list[FigureCell]:
    """The cells of one case, whatever they hold, in the tables of this ``place`` (``records.metrics.columns``)."""
    found = []
    for name, column in columns(place).items():
        one, beside = figure_of(name) or Figure(), figure_of(column.beside) if column.beside else None
        value = one.value if not column.beside or (beside and beside.value is not None) else None
        heading = (place == "page" and column.on_page) or column.heading
        found.append(FigureCell(heading, cell(name, value, one.unit or "1"), value))
        if METRICS[name].of:
            change = f"{column.heading} change" if place == "page" and name != RATE else "change"
            found.append(FigureCell(change, formats.percent(one.change), one.change))
        if name == RATE and place != "markdown":
            smallest = None if one.times_slower else one.detectable
            found.append(FigureCell("detectable", detectable_words(one), smallest))
    return found


def figure_columns(place: str, cases: Iterable[Callable[[str], Figure | Check | None]]) -> list[Column]:
    """The same of several cases."""
    rows = [figure_cells(place, figure_of) for figure_of in cases]
    found = [(cells[0].heading, [cell.text for cell in cells]) for cells in zip(*rows, strict=True)]
    return [Column(rate_heading(cells) if heading == label(RATE) else heading, cells) for heading, cells in found]


def rate_heading(cells: Sequence[str]) -> str:
    """Of rates; those that are no tokens' say their unit."""
    told = [cell for cell in cells if cell != formats.ABSENT]
    return "rate" if told and all("/s" in cell for cell in told) else label(RATE)


def detectable_words(figure: Figure | Check) -> str:
    """The smallest change that this gate would have seen; nothing where it is none to speak of."""
    return formats.ABSENT if figure.times_slower else formats.share(figure.detectable)


def render(columns: Sequence[Column], width: int | None, color: bool) -> list[str]:
    """The lines of the table; the first column is the case. ``width=None`` never folds."""
    if width is None or _total(columns) <= width:
        return draw(columns, color)
    case, *figures = columns
    room = width - _total(figures) - _GAP
    if room >= _NARROWEST_CASE:
        folded = ["\n".join(fold(cell, room)) for cell in case.cells]
        return draw([replace(case, cells=folded), *figures], color)
    # A published figure may stand beside the id; what was measured stays in columns.
    aside = figures.pop() if _total(figures) + len(_INDENT) > width and not figures[-1].colored else None
    # What is folded has no colour, of which a fold knows nothing.
    headings, *rows = draw(figures, color and _total(figures) + len(_INDENT) <= width)
    lines = fold(_INDENT + headings, width, indent=_INDENT)
    for name, row, published in zip(case.cells, rows, aside.cells if aside else case.cells, strict=True):
        beside = f"  {aside.heading} {published}" if aside and published != formats.ABSENT else ""
        lines += [*fold(name + beside, width), *fold(_INDENT + row, width, indent=_INDENT)]
    return lines


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def draw(columns: Sequence[Column], color: bool = False) -> list[str]:
    from rich.console import Console  # noqa: PLC0415 - only the end of a run pays for rich
    from rich.table import Table  # noqa: PLC0415 - the same
    from rich.text import Text  # noqa: PLC0415 - the same

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        # Text and not a string, which rich would read as markup.
        table.add_column(Text(column.heading), justify="right" if column.right else "left", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        styles = (_STYLES.get(cell, "") if column.colored else "" for column, cell in zip(columns, cells, strict=True))
        table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    buffer = io.StringIO()
    # All that rich asks of the environment is said: NO_COLOR, COLUMNS, TERM are pytest's. With room it never wraps.
    console = Console(
        file=buffer,
        width=_total(columns) + 100,
        height=100,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        _environ={},
    )
    console.print(table)
    return [_TRAILING.sub(r"\1", line) for line in buffer.getvalue().splitlines()]


# Tables that leave the terminal: as Markdown. Pure.

#: How a table can be asked for.
FORMATS = ("text", "markdown")

# What Markdown would read as markup, or as the end of a cell. An underscore inside a word is none.
_MARKUP = re.compile(r"[\\`*<\[\]|~$]|&(?=#?\w+;)|(?<!\w)_|_(?!\w)")
# @team tells people, #12 and !12 link to what is discussed: neither a backslash nor &#64; hinders that.
_PINGING = re.compile(r"(?<!\w)@(?=\w)|(?<!&)[#!](?=\d)")
_NO_WIDTH = "&#8203;"


def markdown(columns: Sequence[Column]) -> list[str]:
    """The table in GitHub's Markdown, padded so that its source is a table too."""
    cells = [[escaped(text) for text in (column.heading, *column.cells)] for column in columns]
    widths = [max(3, *map(len, column)) for column in cells]
    rules = ["-" * (width - 1) + ":" if one.right else "-" * width for one, width in zip(columns, widths, strict=True)]
    padded = [
        [text.rjust(width) if column.right else text.ljust(width) for text in texts]
        for column, width, texts in zip(columns, widths, cells, strict=True)
    ]
    heading, *rows = zip(*padded, strict=True)
    return ["| " + " | ".join(row) + " |" for row in (heading, rules, *rows)]


def escaped(text: str) -> str:
    """``text`` as Markdown that shows it, on one line."""
    line = _MARKUP.sub(r"\\\g<0>", " ".join(one_line(text).split()))
    return _PINGING.sub(rf"\g<0>{_NO_WIDTH}", line)


# The line that moves while a launch runs, and the two lines that a log gets instead.

_UPDATES_PER_SECOND = 5
# Below this an id says less than the figures it would push out.
_SHORTEST_ID = 12
# In a log, what takes longer says so, and again each time.
_STILL_SECONDS = 30.0
# A first step that takes longer seems to hang: what it does is said.
_LONG_FIRST_STEP_SECONDS = 5.0


class Numbered(NamedTuple):
    """Which launch of its case a line is about."""

    spec_id: str
    number: int
    """From 1."""
    launches: int
    """As many as its case takes, as far as that is known."""

    def __str__(self) -> str:
        return f"launch {self.number}/{self.launches}"


def live_line(launch: Numbered, progress: Progress, seconds: float, width: int, encoding: str | None) -> str:
    """One line of at most ``width - 1`` (a full one would wrap): the id gives way first, then the lesser figures."""
    room = max(width - 1, 0)
    name, tail, phase = one_line(launch.spec_id, encoding), "", _phase(progress)
    rate = f"{formats.compact(progress.tokens_per_second)} tokens/s" if progress.tokens_per_second > 0 else ""
    memory = formats.memory(progress.reserved_bytes) if progress.reserved_bytes > 0 else ""
    elapsed, number = formats.elapsed(seconds), str(launch)
    for parts in (  # all figures, then fewer and fewer
        (number, phase, rate, memory, elapsed),
        (phase, rate, memory, elapsed),
        (phase, rate, elapsed),
        (phase, elapsed),
        (phase,),
    ):
        tail = _INDENT.join(part for part in parts if part)
        if min(len(name), _SHORTEST_ID) + len(_INDENT) + len(tail) <= room:
            break
    name = shorten_middle(name, room - len(_INDENT) - len(tail), glyphs_of(encoding).ellipsis)
    return (f"{name}{_INDENT}{tail}" if name else tail)[:room].rstrip()


def _phase(progress: Progress) -> str:
    if progress.phase != "training":
        return one_line(progress.phase)
    if progress.step == 0 and progress.phase_seconds > _LONG_FIRST_STEP_SECONDS:
        why = "it compiles kernels" if progress.compiles else "no optimizer has stepped yet"
        return f"first step for {formats.elapsed(progress.phase_seconds)}: {why}"
    return f"step {progress.step}/{progress.steps}" if progress.steps else f"step {progress.step:,}"


class LaunchLines:
    """The lines of one launch: one that moves where ``write`` is given, else two that are said."""

    def __init__(self, launch: Numbered, *, say: Callable[[str], None], write: Callable[[str], None] | None) -> None:
        self._launch, self._say, self._write = launch, say, write
        self._name = f"{one_line(launch.spec_id)}: {launch}"
        self._start = self._said_at = time.monotonic()
        self._drawn_at: float | None = None
        self._is_told = False

    def update(self, progress: Progress) -> None:
        """Show a launch that runs: one that waits for its nodes, or for which no time is left, has not started."""
        now = time.monotonic()
        if self._write is not None:
            if self._drawn_at is None or now - self._drawn_at >= 1 / _UPDATES_PER_SECOND:
                # Asked now and not at the start: the window may have been resized.
                width, encoding = shutil.get_terminal_size().columns, getattr(sys.__stdout__, "encoding", None)
                line = live_line(self._launch, progress, now - self._start, width, encoding)
                self._write(f"\r{line}\x1b[K")
                self._drawn_at = now
        elif not self._is_told:
            self._is_told = True
            self._say(f"{self._name} started")
        elif now - self._said_at >= _STILL_SECONDS:
            self._said_at = now
            self._say(f"{self._name}: {_phase(progress)}, {formats.elapsed(now - self._start)}")

    def finished(self, launch: Launch) -> None:
        row = measured([launch])[RATE]
        figures = (
            f"{formats.tokens_per_second(row.read([launch]))} {row.label}",
            formats.memory(launch.peak_reserved_bytes),
            f"{len(launch.step_seconds)} steps",
            formats.seconds(launch.wall_seconds),
        )
        if self._write is None:
            self._say(f"{self._name} finished: {', '.join(figures)}")
        self.clear()

    def clear(self) -> None:
        """Show nothing more of it: the cursor is left at the start of an empty line."""
        if self._write is not None and self._drawn_at is not None:
            self._write("\r\x1b[K")
            self._drawn_at = None
