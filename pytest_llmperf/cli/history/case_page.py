"""One case: its figures over runs as a chart, and its levels as a table."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmperf.cli.history.run_chart import run_chart
from pytest_llmperf.cli.screen import Screen, plain, table
from pytest_llmperf.judge.history.case_history import CaseHistory, Change, Segment
from pytest_llmperf.report.table import Column
from pytest_llmperf.support import formats

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
