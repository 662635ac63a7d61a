"""From activities to a trace: which step each belongs to, whether all are there, and what they add up to. Pure.

Work belongs to the step in which the host asked for it, which needs no synchronisation: the host is ahead of its
device, and says by its clock where its steps end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from pytest_llmperf.observe.device import ALLOCATIONS, CALLS, LAUNCHES, WAITS, WORK_KINDS
from pytest_llmperf.records.trace import Kind, Trace, TraceRow, short_name


class Work(NamedTuple):
    """What a device did; on the CPU an operator. Times in nanoseconds since 1970."""

    kind: Kind
    name: str
    start: int
    end: int
    correlation: int
    """Of the call that asked for it; of an operator its thread."""


class Call(NamedTuple):
    """What the host asked of the device's driver."""

    name: str
    start: int
    end: int
    correlation: int


class Activities(NamedTuple):
    """Of the traced steps, and somewhat around them."""

    work: list[Work]
    calls: list[Call]


# Of a host's operators: what asks for a tensor's content, as a device would be waited for, and what copies.
_HOST_KINDS: Mapping[str, Kind] = {"aten::_local_scalar_dense": "wait", "aten::copy_": "copy"}


def read(events: Iterable[Any], *, on_host: bool) -> Activities:
    """What ``events`` of a Kineto result are: a host's operators, or a device's work and what its driver was asked."""
    found = Activities([], [])
    for event in events:
        name, start = event.name(), event.start_ns()
        end = start + event.duration_ns()
        is_device = event.device_type().name != "CPU"
        if on_host:
            if not is_device and not event.is_user_annotation() and "::" in name:
                kind = _HOST_KINDS.get(name, "operator")
                found.work.append(Work(kind, name, start, end, event.start_thread_id()))
        elif is_device:
            if not event.is_user_annotation():
                kind = next((kind for word, kind in WORK_KINDS if name.startswith(word)), "kernel")
                found.work.append(Work(kind, name, start, end, event.correlation_id()))
        elif CALLS.match(name):
            found.calls.append(Call(name, start, end, event.correlation_id()))
    return found


_SECONDS = 1e-9


class IncompleteTraceError(Exception):
    """Something is missing in it; says what."""


@dataclass(frozen=True)
class Marks:
    """What the host did when, in nanoseconds since 1970."""

    ends: Sequence[int]
    """The begin of the first traced step, and the end of each."""
    data: Sequence[tuple[int, int]]
    """When the host was inside the loader."""


def step_trace(found: Activities, marks: Marks, *, on_host: bool) -> Trace:
    """What one of the traced steps did.

    Raises:
        IncompleteTraceError: its steps are not alike, or something in it has no match.
    """
    if not found.work:
        raise IncompleteTraceError("the profiler saw no operator" if on_host else "the profiler saw no kernel")
    steps = _on_host(found.work, marks) if on_host else _on_device(found, marks)
    if not any(steps):
        raise IncompleteTraceError("what the profiler saw is of no traced step")
    _refuse_unlike(steps)
    sums: dict[_Key, float] = defaultdict(float)
    counts: Counter[_Key] = Counter()
    for items in steps:
        for key, nanoseconds in items:
            sums[key] += nanoseconds
            counts[key] += 1
    rows = tuple(
        sorted(TraceRow(*key, count / len(steps), sums[key] / len(steps) * _SECONDS) for key, count in counts.items())
    )
    begin, end = marks.ends[0], marks.ends[-1]
    if on_host:
        step_seconds = (end - begin) / len(steps) * _SECONDS
        # All of it: what fetches there is the host itself, by operators and without.
        data = _length(marks.data) / len(steps) * _SECONDS
        # Operators of several threads may take longer together than the step does.
        busy = min(step_seconds - data, sum(row.seconds for row in rows if row.kind != "wait"))
        return Trace(rows=rows, steps=len(steps), step_seconds=step_seconds, busy_seconds=busy, data_seconds=data)
    asked = {call.correlation for call in found.calls if begin < call.start <= end}
    ours = [work for work in found.work if work.correlation in asked]
    end = max([end, *(work.end for work in ours)])
    at_work = _union((work.start, work.end) for work in ours)
    computing = _union((work.start, work.end) for work in ours if work.kind != "collective")
    edges = [begin, *(edge for span in at_work for edge in span), end]
    idle = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    fetched = ((max(start, since), min(stop, until)) for since, until in marks.data for start, stop in idle)
    each = _SECONDS / len(steps)
    return Trace(
        rows=rows,
        steps=len(steps),
        step_seconds=(end - begin) * each,
        busy_seconds=_length(at_work) * each,
        exposed_seconds=(_length(at_work) - _length(computing)) * each,
        data_seconds=_length((start, stop) for start, stop in fetched if start < stop) * each,
    )


# What it was, by kind and name, and its nanoseconds.
_Key = tuple[str, str]
_Item = tuple[_Key, int]


def _on_device(found: Activities, marks: Marks) -> list[list[_Item]]:
    asked = {call.correlation: call for call in found.calls}
    done = {work.correlation for work in found.work}
    steps: list[list[_Item]] = [[] for _ in marks.ends[1:]]
    for work in found.work:
        call = asked.get(work.correlation)
        if call is None:
            raise IncompleteTraceError(f"nothing asked for {short_name(work.name)}: the profiler lost records")
        step = _step_of(call.start, marks)
        if step is not None:
            steps[step].append(((work.kind, short_name(work.name)), work.end - work.start))
    for call in found.calls:
        step = _step_of(call.start, marks)
        if step is None:
            continue
        if LAUNCHES.match(call.name) and call.correlation not in done:
            raise IncompleteTraceError(f"nothing came of a {call.name}: the profiler lost records")
        kind = "wait" if WAITS.match(call.name) else "allocation" if ALLOCATIONS.match(call.name) else ""
        if kind:
            steps[step].append(((kind, call.name), call.end - call.start))
    return steps


def _on_host(work: Sequence[Work], marks: Marks) -> list[list[_Item]]:
    steps: list[list[_Item]] = [[] for _ in marks.ends[1:]]
    for one, own in _own_times(work):
        step = _step_of(one.start, marks)
        # What the loader does is fetching and not the step's: of two workers' batches one step may take in both.
        if step is not None and not any(start <= one.start < end for start, end in marks.data):
            steps[step].append(((one.kind, short_name(one.name)), own))
    return steps


def _own_times(work: Sequence[Work]) -> Iterator[tuple[Work, int]]:
    """Each operator with its time but for that of those which it calls."""
    threads: dict[int, list[Work]] = defaultdict(list)
    for one in work:
        threads[one.correlation].append(one)
    for ours in threads.values():
        open_ones: list[list[int]] = []  # end, and what those inside took
        ordered = sorted(ours, key=lambda one: (one.start, -one.end))
        own = [one.end - one.start for one in ordered]
        for index, one in enumerate(ordered):
            while open_ones and open_ones[-1][0] <= one.start:
                open_ones.pop()
            if open_ones:
                own[open_ones[-1][1]] -= one.end - one.start
            open_ones.append([one.end, index])
        yield from zip(ordered, (max(0, each) for each in own), strict=True)


def _step_of(instant: int, marks: Marks) -> int | None:
    step = bisect_left(marks.ends, instant) - 1
    return step if 0 <= step < len(marks.ends) - 1 else None


def _refuse_unlike(steps: Sequence[Sequence[_Item]]) -> None:
    """All steps have the same; what the allocator asks of the driver comes and goes."""
    gating = [Counter(key for key, _ in items if key[0] != "allocation") for items in steps]
    for one, other in pairwise(gating):
        if one != other:
            kind, name = next(iter((one - other) + (other - one)))
            raise IncompleteTraceError(
                f"its steps are not alike ({one[kind, name]} and {other[kind, name]} of {kind} {name})"
            )


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)
