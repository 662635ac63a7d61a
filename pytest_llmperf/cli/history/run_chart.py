"""The chart of a case in a terminal: a column for each run, its levels, and where they change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.judge.history.case_history import CaseHistory
from pytest_llmperf.records.past_result import PastResult
from pytest_llmperf.report.text import ASCII
from pytest_llmperf.support import formats

_HEIGHT = 9
_MOST_COLUMNS, _LEAST_COLUMNS = 100, 20
_LABEL = 9
# A narrower axis would make mountains of a tenth of a per cent.
_LEAST_SPAN = 0.01


@dataclass(frozen=True)
class _Column:
    rate: float | None
    """Of its runs the middle one; ``None``: none of them counts."""
    level: float | None
    begins: int
    """The number of the change that is in it; 0: none."""


def run_chart(history: CaseHistory, screen: Screen) -> list[str]:
    """Lines of the terminal's width; where there are more runs than columns, each has several."""
    width = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, (screen.width or _MOST_COLUMNS) - _LABEL - 3))
    columns = _columns(history, width)
    values = [value for column in columns for value in (column.rate, column.level) if value]
    if not values:
        return []
    low, high = min(values), max(values)
    slack = max(0.0, _LEAST_SPAN * high - (high - low)) / 2
    low, high = low - slack, high + slack
    is_plain = screen.glyphs is ASCII
    point, line, edge, axis = ("*", "-", "|", "|") if is_plain else ("●", "─", "┊", "│")
    rows = [[" "] * len(columns) for _ in range(_HEIGHT)]
    for number, column in enumerate(columns):
        if column.begins:
            for row in rows:
                row[number] = edge
        for value, mark in ((column.level, line), (column.rate, point)):
            if value:
                rows[_row(value, low, high)][number] = mark
    labels = {0: high, _HEIGHT // 2: (low + high) / 2, _HEIGHT - 1: low}
    drawn = [f"{_short(labels.get(number)):>{_LABEL}} {axis}{''.join(row)}".rstrip() for number, row in enumerate(rows)]
    first, last = history.results[0].began[:10], history.results[-1].began[:10]
    below = " " * (_LABEL + 2)
    marks = "".join(str(column.begins % 10) if column.begins else " " for column in columns)
    is_wide = len(columns) > 2 * len(first)
    dates = f"{first}{last:>{len(columns) - len(first)}}" if is_wide else f"{first} to {last}"
    return [
        f"{'tokens/s/GPU' if history.results[-1].tokens_per_step else 'steps/s'}",
        *drawn,
        *([f"{below}{marks}".rstrip()] if marks.strip() else []),
        f"{below}{dates}",
    ]


def _short(value: float | None) -> str:
    return "" if value is None else formats.tokens_per_second(value)


def _row(value: float, low: float, high: float) -> int:
    share = 0.5 if high == low else (high - value) / (high - low)
    return min(_HEIGHT - 1, max(0, round(share * (_HEIGHT - 1))))


def _columns(history: CaseHistory, width: int) -> list[_Column]:
    """From left to right, none of two levels."""
    results = history.results
    levels = {id(result): number for number, segment in enumerate(history.segments) for result in segment.results}
    each = math.ceil(len(results) / width)
    # An invalid run belongs to the level around it.
    numbers, number = list[int](), 0
    for result in results:
        number = levels.get(id(result), number)
        numbers.append(number)
    found = []
    for level, segment in enumerate(history.segments):
        own = [result for result, number in zip(results, numbers, strict=True) if number == level]
        for start in range(0, len(own), each):
            counted = [result for result in own[start : start + each] if id(result) in levels]
            rate = segment.rate(segment.step_seconds) or 1 / segment.step_seconds
            found.append(_Column(_middle(counted), rate, level if start == 0 else 0))
    return found


def _middle(results: Sequence[PastResult]) -> float | None:
    if not results:
        return None
    return median(result.tokens_per_second_per_gpu or 1 / result.step_seconds for result in results)
