"""A step, part by part; and two of them side by side."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmperf.analysis.likely_causes import CATEGORIES, COMMUNICATION, category
from pytest_llmperf.analysis.step_difference import DATA, HOST, hidden_seconds, parts_of, step_difference
from pytest_llmperf.analysis.step_words import count_moved, milliseconds, points_to, short_kernel
from pytest_llmperf.cli.screen import Screen, table
from pytest_llmperf.cli.traced import Traced
from pytest_llmperf.records.trace import COUNTED, WORK, Trace
from pytest_llmperf.report.table import Column
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import formats

_INDENT = "  "
_MOST_NAMES = 3
_MOST_MOVED = 6


def step_page(one: Traced, screen: Screen) -> Iterator[str]:
    """Of what a step of ``one`` consists."""
    parts, trace = parts_of(one.trace), one.trace
    names = [name for name in (*CATEGORIES, HOST, DATA) if parts.get(name)]
    yield one_line(f"{one.name}: {_size(trace)}")
    yield from table(
        [
            Column("part", names, right=False),
            Column("ms a step", [f"{parts[name] * 1000:.2f}" for name in names]),
            Column(
                "share",
                [formats.share(parts[name] / trace.step_seconds if trace.step_seconds else None) for name in names],
            ),
            Column("calls", [f"{_calls(trace, name):g}" if name in CATEGORIES else formats.ABSENT for name in names]),
            Column("most of it", [_longest(trace, name) for name in names], right=False),
        ],
        screen,
    )
    if trace.is_on_host:
        return
    hidden = hidden_seconds(trace)
    if hidden > 0:
        yield f"{hidden * 1000:.2f} ms of {COMMUNICATION} are hidden behind other kernels"
    waits = [f"{row.name} {row.count:g}" for row in trace.rows if row.kind == "wait"]
    yield f"the host waits for its device: {', '.join(waits) or 'never'}"


def difference_page(before: Traced, after: Traced, screen: Screen) -> Iterator[str]:
    """Of what the difference between their steps consists."""
    difference = step_difference(before.trace, after.trace)
    yield one_line(f"before: {before.name}: {_size(before.trace)}")
    yield one_line(f"after:  {after.name}: {_size(after.trace)}")
    if before.case != after.case:
        yield one_line(f"two cases: what {after.case} does need not be what {before.case} does")
    yield one_line(points_to(difference))
    parts = [part for part in difference.parts if part.before or part.after]
    # Parts and what is unexplained add up to the step, in each column.
    sides = [
        *((part.name, part.before, part.after) for part in parts),
        ("unexplained", _unexplained(before.trace), _unexplained(after.trace)),
        ("the step", before.trace.step_seconds, after.trace.step_seconds),
    ]
    yield from table(
        [
            Column("part", [name for name, _, _ in sides], right=False),
            Column("before", [f"{then * 1000:.2f} ms" for _, then, _ in sides]),
            Column("after", [f"{now * 1000:.2f} ms" for _, _, now in sides]),
            Column("change", [milliseconds(now - then) for _, then, now in sides]),
        ],
        screen,
    )
    for part in parts:
        for change in part.names[:_MOST_MOVED]:
            yield _INDENT + one_line(
                f"{part.name}: {count_moved(change)}, {milliseconds(change.seconds)}: {change.name}"
            )
        if len(part.names) > _MOST_MOVED:
            yield f"{_INDENT}{part.name}: {len(part.names) - _MOST_MOVED} more"
    for change in difference.waits:
        yield _INDENT + one_line(f"waits of the host: {change.name} {count_moved(change)}")
    for name in sorted({*before.versions} | {*after.versions}):
        then, now = before.versions.get(name, "none"), after.versions.get(name, "none")
        if then != now:
            yield one_line(f"different: {name}: {then} -> {now}")


def _unexplained(trace: Trace) -> float:
    """Below nothing where kernels ran beside one another; nothing where it is less than is shown."""
    return round(trace.step_seconds - sum(parts_of(trace).values()), 6) + 0.0


def _size(trace: Trace) -> str:
    counts = [f"{trace.count(name):g} {name.removesuffix('_per_step')}" for name in COUNTED if trace.count(name)]
    ranks = f" on each of {trace.ranks} ranks" if trace.ranks > 1 else ""
    return f"{trace.step_seconds * 1000:.1f} ms a step{ranks}, {', '.join(counts)}"


def _calls(trace: Trace, part: str) -> float:
    return sum(row.count for row in trace.rows if row.kind in WORK and category(row.kind, row.name) == part)


def _longest(trace: Trace, part: str) -> str:
    rows = [row for row in trace.rows if row.kind in WORK and category(row.kind, row.name) == part]
    names = dict.fromkeys(short_kernel(row.name) for row in sorted(rows, key=lambda row: -row.seconds))
    return ", ".join([*names][:_MOST_NAMES]) or formats.ABSENT
