"""Tracer: the profiler around a few steps that nobody times; what one of them did, by kind and name.

CUPTI serves one client at a time, and one that stays attached may slow what comes later: it is the last that a rank
does with its device. Whatever the profiler raises makes the launch no worse: it has no trace then, and says why.

Work belongs to the step in which the host asked for it, which needs no synchronisation: the host is ahead of its
device, and says by its clock where its steps end."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import profile

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.observe.environment import Project
from pytest_llmperf.observe.places import Exchanges, Places, exchanges, recorded
from pytest_llmperf.records.trace import Key, Kind, Trace, TraceRow, short_name

#: Two that agree could have lost the same; a fourth says no more. Of steps that take so many seconds two cost enough.
TRACED_STEPS, LONG_SECONDS = 3, 0.5

_OTHER_CLIENT = "another profiler may hold CUPTI on this host (nsys, compute-sanitizer, DCGM's profiling fields)"


class Tracer:
    def __init__(
        self, device: torch.device, *, ahead: bool = False, is_ours: bool = True, project: Project | None = None
    ) -> None:
        """``ahead``: workers fetch ahead. Then timed steps' fetches are timed too: what workers have kept ready while
        nobody trained, between timed and traced steps, a trace takes for speed."""
        self._device, self._on_host, self._left, self._ahead = device, not gpu.is_gpu(device), TRACED_STEPS, ahead
        # In how many of its last steps it looks for places: those of a script may be unlike.
        self._is_ours, self._looks_in = is_ours, 1 if is_ours else TRACED_STEPS
        self._places = Places(device, project, looks_on=self._on_host and project is not None and not is_ours)
        self._profile: Any = None
        self._ends: list[int] = []
        self._data: list[tuple[int, int]] = []
        self._taken: list[tuple[int, int]] = []  # of a script's, from workers
        self._fetch, self._fetch_start = 0, 0.0
        self._fetched: list[float] = []  # of each step from the first one on, in seconds
        self._none = ""

    @property
    def is_running(self) -> bool:
        return bool(self._ends) and self._left > 0

    def shorten(self) -> None:
        """Before it begins: one step less."""
        self._left -= 1
        self._looks_in = min(self._looks_in, self._left)

    def begin(self) -> None:
        """With the next step."""

        def started() -> Any:
            if is_profiled():  # another would end it
                raise RuntimeError("the training's own profiler runs")
            started = profile(activities=[gpu.profiled(self._device)])
            started.start()
            return started

        self._profile = self._tried(started)
        # A profiler takes longer to start on one rank than on another, and the others' first step would wait for it.
        if dist.is_initialized() and self._is_ours:
            dist.barrier(device_ids=gpu.barrier_devices(self._device))
        self._ends.append(time.time_ns())
        self._look()

    def _look(self) -> None:
        if self._left == self._looks_in:
            with suppress(Exception):  # a trace without places is one all the same
                self._places.begin()

    def fetch_begins(self) -> None:
        """A step's batches are asked for; a Trainer that does not say so fetches from the last step's end on."""
        if self.is_running:
            self._fetch = time.time_ns()
        if self._ahead:
            self._fetch_start = time.perf_counter()

    def batch_arrived(self) -> None:
        """All of a step, or its first; the first word counts."""
        if self._fetch_start:
            self._fetched.append(time.perf_counter() - self._fetch_start)
            self._fetch_start = 0.0
        if self.is_running and len(self._data) < len(self._ends):
            self._data.append((max(self._fetch, self._ends[-1]), time.time_ns()))

    def fetched(self, start: int, end: int, *, from_workers: bool) -> None:
        """The host was inside a loader, one of several times in a step."""
        self._data.append((max(start, self._ends[0]), end))
        self._taken += self._data[-1:] * from_workers

    def end_step(self) -> bool:
        """Whether that was the last one."""
        self._ends.append(time.time_ns())
        self._left -= 1
        self._look()
        if self._left == 0:
            self._places.end()
            gpu.wait(self._device)
            self._stop()  # steps that come after these are not its
        return self._left == 0

    def trace(self, error: BaseException | None, timed: Sequence[float], warmup_steps: int) -> Trace:
        """Return what was seen; ``error`` has ended its steps early, ``timed`` are the seconds of those before them."""
        if error is not None and self.is_running:
            self._places.end()
            self._stop()
            self._none = f"a traced step failed ({said(error)})"
        if self._none or self._profile is None:
            return Trace(none=self._none or "it was not begun")
        return with_timed_waits(self._tried(self._read) or Trace(none=self._none), self._fetched, timed, warmup_steps)

    def _stop(self) -> None:
        if self._profile is not None:
            self._tried(self._profile.stop)

    def _read(self) -> Trace:
        found = read(self._profile.profiler.kineto_results.events(), on_host=self._on_host)
        try:
            marks = Marks(self._ends, self._data, self._data if self._is_ours else self._taken)
            trace = step_trace(found, marks, on_host=self._on_host, are_alike=self._is_ours)
        except IncompleteTraceError as incomplete:
            is_refused = not found.work and not self._on_host
            self._none = f"{incomplete}; {_OTHER_CLIENT}" if is_refused else str(incomplete)
            return Trace(none=self._none)
        exchanged = Exchanges()
        with suppress(Exception):  # another torch's record has another form; a trace without it is one all the same
            exchanged = exchanges(recorded(dist), self._ends, self._places.place)
        places = self._places.found(self._looks_in)
        places |= {"exchange": dict(exchanged.places)} if exchanged.places else {}
        return replace(trace, rows=tuple(sorted((*trace.rows, *exchanged.rows))), places=places)

    def _tried(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - whatever a profiler may raise, what was measured stands
            self._none = self._none or f"the profiler failed ({said(error)})"
            return None


def is_profiled() -> bool:
    return bool(torch.autograd._profiler_enabled())  # noqa: SLF001 - torch.profiler has no word for it


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def with_timed_waits(trace: Trace, fetched: Sequence[float], step_seconds: Sequence[float], warmup_steps: int) -> Trace:
    """``trace`` with the waits for data of the timed steps, whose fetches took ``fetched``; with none, as it is. While
    the host is inside the loader a device may still have work: it waits for no longer than it is idle."""
    # A mean: of several workers one is late, and the next ones' batches have come meanwhile.
    steps = list(zip(fetched, step_seconds, strict=False))[warmup_steps:]
    if not (trace and steps):
        return trace
    waited = fmean(fetch for fetch, _ in steps)
    if not trace.is_on_host:
        waited = min(waited, max(0.0, fmean(step for _, step in steps) - trace.busy_seconds))
    return replace(trace, data_seconds=waited, step_seconds=trace.step_seconds - trace.data_seconds + waited)


# From activities to a trace: which step each belongs to, whether all are there, and what they add up to. Pure.


class Work(NamedTuple):
    """A device's work; on the CPU an operator. Times in nanoseconds since 1970."""

    kind: Kind
    name: str
    start: int
    end: int
    correlation: int
    """The call's that asked for it; an operator's thread."""


class Call(NamedTuple):
    name: str
    start: int
    end: int
    correlation: int


class Activities(NamedTuple):
    """All of the traced steps, and somewhat around them."""

    work: list[Work]
    calls: list[Call]
    exchanges: Sequence[tuple[int, int]] = ()
    """Of a host, when each began and ended."""


class Marks(NamedTuple):
    """The host's times, in nanoseconds since 1970."""

    ends: Sequence[int]
    """The begin of the first traced step, and the end of each."""
    data: Sequence[tuple[int, int]]
    """When the host was inside the loader."""
    apart: Sequence[tuple[int, int]] = ()
    """When it did what is no step's: of two workers' batches one step may take in both."""

    def step_of(self, instant: int) -> int | None:
        step = bisect_left(self.ends, instant) - 1
        return step if 0 <= step < len(self.ends) - 1 else None


class IncompleteTraceError(Exception):
    """Something is missing in it; says what."""


# Of a host's operators: what asks for a tensor's content, as a device would be waited for, and what copies.
_HOST_KINDS: Mapping[str, Kind] = {"aten::_local_scalar_dense": "wait", "aten::copy_": "copy"}


def read(events: Iterable[Any], *, on_host: bool) -> Activities:
    """Sort ``events`` of a Kineto result: a host's operators, or a device's work and what its driver was asked."""
    exchanges: list[tuple[int, int]] = []
    found = Activities([], [], exchanges)
    for event in events:
        name, start = event.name(), event.start_ns()
        end = start + event.duration_ns()
        is_device = event.device_type().name != "CPU"
        if on_host and name.startswith(gpu.HOST_EXCHANGES):
            exchanges.append((start, end))
        elif on_host:
            if not is_device and not event.is_user_annotation() and "::" in name:
                kind = _HOST_KINDS.get(name, "operator")
                found.work.append(Work(kind, name, start, end, event.start_thread_id()))
        elif is_device:
            if not event.is_user_annotation():
                kind = next((kind for word, kind in gpu.WORK_KINDS if name.startswith(word)), "kernel")
                found.work.append(Work(kind, name, start, end, event.correlation_id()))
        elif gpu.CALLS.match(name):
            found.calls.append(Call(name, start, end, event.correlation_id()))
    return found


# What it was, and its nanoseconds.
_Item = tuple[Key, int]


def step_trace(found: Activities, marks: Marks, *, on_host: bool, are_alike: bool = True) -> Trace:
    """What a traced step did, or the mean of all; IncompleteTraceError: they are not alike, or some has no match."""
    if not found.work:
        raise IncompleteTraceError("the profiler saw no operator" if on_host else "the profiler saw no kernel")
    steps: list[list[_Item]] = [[] for _ in marks.ends[1:]]
    for step, item in _host_items(found.work, marks) if on_host else _device_items(found, marks):
        steps[step].append(item)
    if not any(steps):
        raise IncompleteTraceError("what the profiler saw is of no traced step")
    # All steps have the same; what the allocator asks of the driver comes and goes.
    gating = [Counter(key for key, _ in items if key[0] != "allocation") for items in steps]
    for one, other in pairwise(gating) if are_alike else ():
        if one != other:
            key = next(iter((one - other) + (other - one)))
            raise IncompleteTraceError(f"its steps are not alike ({one[key]} and {other[key]} of {' '.join(key)})")
    spent: dict[Key, list[int]] = defaultdict(list)
    for items in steps:
        for key, nanoseconds in items:
            spent[key].append(nanoseconds)
    number = len(steps)
    rows = tuple(sorted(TraceRow(*key, len(all_) / number, sum(all_) / number * 1e-9) for key, all_ in spent.items()))
    return _host_trace(rows, found, marks, number) if on_host else _device_trace(rows, found, marks, number)


def _host_trace(rows: tuple[TraceRow, ...], found: Activities, marks: Marks, steps: int) -> Trace:
    step_seconds = (marks.ends[-1] - marks.ends[0]) / steps * 1e-9
    # All of it: what fetches there is the host itself, by operators and without.
    data = _length(marks.data) / steps * 1e-9
    # Operators of several threads may take longer together than the step does.
    within = ((max(start, marks.ends[0]), min(end, marks.ends[-1])) for start, end in found.exchanges)
    return Trace(
        rows=rows,
        steps=steps,
        step_seconds=step_seconds,
        busy_seconds=min(step_seconds - data, sum(row.seconds for row in rows if row.kind != "wait")),
        data_seconds=data,
        exchange_seconds=_length(_union(span for span in within if span[0] < span[1])) / steps * 1e-9,
    )


def _device_trace(rows: tuple[TraceRow, ...], found: Activities, marks: Marks, steps: int) -> Trace:
    begin, end = marks.ends[0], marks.ends[-1]
    asked = {call.correlation for call in found.calls if begin < call.start <= end}
    ours = [work for work in found.work if work.correlation in asked]
    end = max([end, *(work.end for work in ours)])
    at_work = _union((work.start, work.end) for work in ours)
    computing = _union((work.start, work.end) for work in ours if work.kind != "collective")
    edges = [begin, *(edge for span in at_work for edge in span), end]
    idle = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    fetched = ((max(start, since), min(stop, until)) for since, until in marks.data for start, stop in idle)
    each = 1e-9 / steps
    return Trace(
        rows=rows,
        steps=steps,
        step_seconds=(end - begin) * each,
        busy_seconds=_length(at_work) * each,
        exposed_seconds=(_length(at_work) - _length(computing)) * each,
        data_seconds=_length((start, stop) for start, stop in fetched if start < stop) * each,
    )


def _device_items(found: Activities, marks: Marks) -> Iterator[tuple[int, _Item]]:
    asked = {call.correlation: call for call in found.calls}
    done = {work.correlation for work in found.work}
    for work in found.work:
        if (call := asked.get(work.correlation)) is None:
            raise IncompleteTraceError(f"nothing asked for {short_name(work.name)}: the profiler lost records")
        if (step := marks.step_of(call.start)) is not None:
            yield step, ((work.kind, short_name(work.name)), work.end - work.start)
    for call in found.calls:
        if (step := marks.step_of(call.start)) is None:
            continue
        if gpu.LAUNCHES.match(call.name) and call.correlation not in done:
            raise IncompleteTraceError(f"nothing came of a {call.name}: the profiler lost records")
        kind = "wait" if gpu.WAITS.match(call.name) else "allocation" if gpu.ALLOCATIONS.match(call.name) else ""
        if kind:
            yield step, ((kind, call.name), call.end - call.start)


def _host_items(work: Sequence[Work], marks: Marks) -> Iterator[tuple[int, _Item]]:
    """Operators, each with its time but for that of those which it calls."""
    threads: dict[int, list[Work]] = defaultdict(list)
    for one in work:
        threads[one.correlation].append(one)
    for ours in threads.values():
        open_ones: list[list[int]] = []  # end and place of those that are being called
        ordered = sorted(ours, key=lambda one: (one.start, -one.end))
        own = [one.end - one.start for one in ordered]
        for index, one in enumerate(ordered):
            while open_ones and open_ones[-1][0] <= one.start:
                open_ones.pop()
            if open_ones:
                own[open_ones[-1][1]] -= one.end - one.start
            open_ones.append([one.end, index])
        for one, nanoseconds in zip(ordered, own, strict=True):
            step = marks.step_of(one.start)
            if step is not None and not any(start <= one.start < end for start, end in marks.apart):
                yield step, ((one.kind, short_name(one.name)), max(0, nanoseconds))


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
