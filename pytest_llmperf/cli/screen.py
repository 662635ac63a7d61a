"""Where a command's lines go, and tables for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.report.table import Column, render
from pytest_llmperf.report.text import Glyphs, one_line
from pytest_llmperf.support import formats


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
