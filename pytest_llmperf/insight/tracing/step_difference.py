"""StepDifference: of what the difference between two traced steps consists, part by part. Pure.

A part's change is that of its kernels' times; what the device waited for, it did nothing. Both together are the change
of the step but for kernels that ran beside one another, which is told as unexplained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.insight.tracing.kernel_categories import CATEGORIES, COMMUNICATION, category
from pytest_llmperf.insight.tracing.likely_causes import likely_causes
from pytest_llmperf.insight.tracing.rank_differences import LastRank, OddRank, last_rank, odd_ranks
from pytest_llmperf.records.trace import WORK, Trace, TraceRow

HOST, DATA = "idle: the host", "waiting for data"


@dataclass(frozen=True)
class NameChange:
    """One kernel, copy or operator."""

    name: str
    count: float
    """How many more a step; negative: fewer."""
    seconds: float
    is_new: bool = False
    is_gone: bool = False


@dataclass(frozen=True, kw_only=True)
class Part:
    """One category, or what the device waited for."""

    name: str
    before: float
    after: float
    """Seconds of a step."""
    names: tuple[NameChange, ...] = ()
    """Of which counts moved, most time first."""

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """Of a step then and now."""

    before: float
    after: float
    parts: tuple[Part, ...]
    """That moved most first."""
    waits: tuple[NameChange, ...]
    """Of the host, whose counts moved."""
    causes: tuple[str, ...] = ()
    """What the counts are known to come from, in words."""
    odd_ranks: tuple[OddRank, ...] = ()
    last_rank: LastRank | None = None
    is_on_host: bool = False
    """Whether operators of a CPU stand for kernels, whose times say little."""

    @property
    def change(self) -> float:
        """In seconds; positive is slower."""
        return self.after - self.before

    @property
    def data(self) -> Part:
        """What is waited for the next batch."""
        return next(part for part in self.parts if part.name == DATA)

    @property
    def unexplained(self) -> float:
        """What no part tells: kernels that ran beside one another then, or do now."""
        return self.change - sum(part.change for part in self.parts)

    @property
    def is_the_same_work(self) -> bool:
        """Whether the same was done as often: then the hardware took longer, or the host."""
        return not self.waits and not any(part.names for part in self.parts)


def parts_of(trace: Trace) -> dict[str, float]:
    """Seconds of a step by category, and of waiting; exchanges as far as nothing else ran beside them."""
    sums: dict[str, float] = defaultdict(float)
    for row in _work(trace):
        if row.kind != "collective":
            sums[category(row.kind, row.name)] += row.seconds
    if _exchanges(trace):
        sums[COMMUNICATION] += trace.exposed_seconds
    return {**sums, HOST: trace.idle_seconds, DATA: trace.data_seconds}


def hidden_seconds(trace: Trace) -> float:
    """For how long a step exchanges with other ranks while its device computes as well."""
    return sum(row.seconds for row in trace.rows if row.kind == "collective") - trace.exposed_seconds


def _exchanges(trace: Trace) -> bool:
    return any(row.kind == "collective" for row in trace.rows)


def step_difference(before: Trace, after: Trace) -> StepDifference:
    """What ``after`` does that ``before`` did not, and how long each took."""
    then, now = parts_of(before), parts_of(after)
    names = _names(_work(before), _work(after))
    parts = [
        Part(
            name=name,
            before=then.get(name, 0.0),
            after=now.get(name, 0.0),
            names=tuple(change for part, change in names if part == name),
        )
        for name in (*CATEGORIES, HOST, DATA)
        if name in then or name in now
    ]
    waits = _names(_waits(before), _waits(after))
    return StepDifference(
        before=before.step_seconds,
        after=after.step_seconds,
        parts=tuple(sorted(parts, key=lambda part: -abs(part.change))),
        waits=tuple(change for _, change in waits),
        causes=likely_causes(before, after),
        odd_ranks=odd_ranks(before, after),
        last_rank=last_rank(before, after),
        is_on_host=after.is_on_host,
    )


def _work(trace: Trace) -> list[TraceRow]:
    return [row for row in trace.rows if row.kind in WORK]


def _waits(trace: Trace) -> list[TraceRow]:
    return [row for row in trace.rows if row.kind == "wait"]


def _names(before: Sequence[TraceRow], after: Sequence[TraceRow]) -> list[tuple[str, NameChange]]:
    """Each name whose count moved, with its category, most time first."""
    then, now = ({(row.kind, row.name): row for row in rows} for rows in (before, after))
    found = []
    for key in {*then, *now}:
        was, is_ = then.get(key), now.get(key)
        count = (is_.count if is_ else 0.0) - (was.count if was else 0.0)
        seconds = (is_.seconds if is_ else 0.0) - (was.seconds if was else 0.0)
        if count:
            change = NameChange(key[1], count, seconds, is_new=was is None, is_gone=is_ is None)
            found.append((category(*key), change))
    return sorted(found, key=lambda each: (-abs(each[1].seconds), each[1].name))
