"""What a command answers, where its lines go, and how they are laid out there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.report.table import Column, render
from pytest_llmperf.report.text import Glyphs, one_line
from pytest_llmperf.support import formats


@dataclass(frozen=True)
class Answer:
    """Lines to print."""

    lines: Iterable[str]
    troubles: Sequence[str] = ()
    """For standard error, a line each; one is enough for exit code 1. Lines that take their time may add to it."""
    for_programs: bool = False
    """Whether its lines are a format that no terminal's width may break."""
    acts: bool = False
    """Whether its lines tell of what is done meanwhile: that goes on to its end, read or not."""


class CommandError(Exception):
    """Who, what, what was expected and what to do, a line each; the command ends with exit code 1."""


class CaseError(CommandError):
    """No baselines, or no such case: one line with who, what was expected, the nearest known name and what to do."""


class NotStoredError(CaseError):
    """Nothing of that name is stored, or nothing at all: what its settings name can do without."""


class ClusterError(CommandError):
    """A cluster file that cannot serve: one line with the file, what is wrong and what was expected."""


@dataclass(frozen=True)
class Screen:
    """Where lines go: how wide it is (``None`` for a file or a pipe), and what it can show."""

    width: int | None
    glyphs: Glyphs


def table(columns: Sequence[Column], screen: Screen) -> list[str]:
    """The project's table; a terminal's width, else none."""
    return render(columns, screen.width, color=False, glyphs=screen.glyphs)


def facts(values: Mapping[str, object]) -> list[str]:
    """Names and values, the values in a column."""
    width = max(map(len, values), default=0)
    return [f"  {plain(name):{width}}  {plain(value) or formats.ABSENT}" for name, value in values.items()]


def plain(value: object) -> str:
    """What a file says, as one line: whatever its type, it moves no cursor."""
    return one_line(str(value))
