"""One case: its figures over runs as a chart, and its levels as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pytest_llmperf.cli.screen import Screen, plain, table
from pytest_llmperf.judge.case_histories import CaseHistory, Change, Segment
from pytest_llmperf.records.past_result import PastResult
from pytest_llmperf.report.table import Column
from pytest_llmperf.report.text import ASCII
from pytest_llmperf.support import formats

# The chart of a case in a terminal: a column for each run, its levels, and where they change.


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


#: Of a step that is no change point.
WITH_HOST = "the host changed with it: cannot be told apart"


def case_page(history: CaseHistory, screen: Screen) -> list[str]:
    """What is known of it."""
    lines = [f"{plain(history.id)} on {plain(history.machine)}: {_size(history)}"]
    if not history.segments:
        return [*lines, "every run of it was invalid: nothing to draw"]
    lines += ["", *run_chart(history, screen), "", *_table(history.segments, screen)]
    for number, segment in enumerate(history.segments[1:], 1):
        lines += [
            "",
            f"change {number}, {segment.results[0].began[:10]}: {_change(segment.change)}",
            *(f"  {plain(line)}" for line in segment.different or ("nothing else that is recorded changed with it",)),
        ]
    for step in history.steps:
        lines += [
            "",
            f"{step.began[:10]}: {formats.percent(step.rate)}, {WITH_HOST}",
            *map("  {}".format, map(plain, step.different)),
        ]
    if history.is_short:
        lines += ["", "too few runs for a change point: it takes two before and two after it"]
    return lines


def _size(history: CaseHistory) -> str:
    first, last = history.results[0].began[:10], history.results[-1].began[:10]
    runs, hosts = len(history.results), {launch.host for result in history.results for launch in result.launches}
    return (
        f"{runs} run{'s' * (runs != 1)}, {first} to {last}, on {len(hosts)} host{'s' * (len(hosts) != 1)}; "
        f"digest {plain(history.digest)}" + (f"; project {plain(history.project)}" if history.project else "")
    )


def _table(segments: Sequence[Segment], screen: Screen) -> list[str]:
    newest = [one.results[-1] for one in segments]
    return table(
        [
            Column("from", [one.results[0].began[:10] for one in segments], right=False),
            Column("to", [one.results[-1].began[:10] for one in segments], right=False),
            Column("runs", [str(len(one.results)) for one in segments]),
            Column("tokens/s/GPU", [formats.tokens_per_second(one.rate(one.step_seconds)) for one in segments]),
            Column("95 of 100 in", [_interval(one) for one in segments], right=False),
            Column("step", [formats.seconds(one.step_seconds) for one in segments]),
            Column("change", [formats.percent(one.change.rate if one.change else None) for one in segments]),
            Column("peak memory", [formats.memory(one.peak_reserved_bytes) for one in newest]),
            Column("torch", [plain(one.versions.get("torch", formats.ABSENT)) for one in newest], right=False),
            Column("revision", [plain(one.revision or formats.ABSENT) for one in newest], right=False),
        ],
        screen,
    )


def _change(change: Change | None) -> str:
    if change is None:
        return "a step does not do what it did"
    told = f"{formats.percent(change.rate)} ({formats.percent(change.low)} to {formats.percent(change.high)})"
    if change.shared is None:
        return told
    return f"{told}, {formats.percent(change.shared)} of all cases that ran with it: look at what they share"


def _interval(segment: Segment) -> str:
    # The longest step is the lowest rate.
    return " to ".join(formats.tokens_per_second(segment.rate(one)) for one in (segment.high, segment.low))


# All cases: their last figure and their latest change point, worst first.


# Of a machine kind; those with a change point are all shown.
_MOST_CASES = 500
_NOTHING = "nothing that is recorded"


def list_page(histories: Sequence[CaseHistory], screen: Screen) -> list[str]:
    """A table for each machine kind."""
    lines = list[str]()
    for machine in dict.fromkeys(one.machine for one in histories):
        group = sorted((one for one in histories if one.machine == machine), key=_urgency)
        changed = sum(one.latest_change is not None for one in group)
        told = f"{len(group)} case{'s' * (len(group) != 1)}, {changed or 'none'} of them with a change point"
        # Whoever has to look at a case finds it in the first ones, and no terminal shows thousands at once.
        shown = group[: max(_MOST_CASES, changed)]
        lines += [*([""] if lines else []), f"{plain(machine)}: {told}", *_list_page_table(shown, screen)]
        if len(group) > len(shown):
            lines.append(f"{len(group) - len(shown)} more without a change point: name a part of an id, or add --json")
    return lines


def _urgency(one: CaseHistory) -> tuple[bool, bool, float, str]:
    latest = one.latest_change
    return latest is None, not one.steps, latest.change.rate if latest and latest.change else 0.0, one.id


def _list_page_table(group: Sequence[CaseHistory], screen: Screen) -> list[str]:
    projects = any(one.project for one in group)
    latest = [_latest(one) for one in group]
    return table(
        [
            Column("case", [plain(one.id) for one in group], right=False),
            *([Column("project", [plain(one.project) for one in group], right=False)] if projects else []),
            Column("runs", [str(len(one.results)) for one in group]),
            Column("last run", [one.results[-1].began[:10] for one in group], right=False),
            Column("tokens/s/GPU", [_last(one) for one in group]),
            Column("verdict", [plain(one.results[-1].verdict) for one in group], right=False, colored=True),
            Column("latest change", [one[0] for one in latest]),
            Column("since", [one[1] for one in latest], right=False),
            Column("what else changed", [one[2] for one in latest], right=False),
        ],
        screen,
    )


def _last(one: CaseHistory) -> str:
    return formats.tokens_per_second(one.results[-1].tokens_per_second_per_gpu)


def _latest(one: CaseHistory) -> tuple[str, str, str]:
    """The rate of its latest change, since when, and what else changed."""
    latest = one.latest_change
    if one.steps and (latest is None or one.steps[-1].began > latest.results[0].began):
        return formats.percent(one.steps[-1].rate), one.steps[-1].began[:10], WITH_HOST
    if latest is None:
        return formats.ABSENT, formats.ABSENT, formats.ABSENT
    more = len(latest.different) - 1
    different = plain(latest.different[0]) + (f" (+{more})" if more else "") if latest.different else _NOTHING
    return formats.percent(latest.change.rate if latest.change else None), latest.results[0].began[:10], different
