"""Tracer: the profiler around a few steps that nobody times, after all that are timed.

CUPTI serves one client at a time, and one that stays attached may slow what comes later: it is the last that a rank
does with its device. Whatever the profiler raises makes the launch no worse: it has no trace then, and says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.observe.step_trace import IncompleteTraceError, Marks, read, step_trace
from pytest_llmperf.records.trace import Trace

#: Two that agree could have lost the same; a fourth says no more.
STEPS = 3

_OTHER_CLIENT = "another profiler may hold CUPTI on this host (nsys, compute-sanitizer, DCGM's profiling fields)"


class Tracer:
    """Of one rank."""

    def __init__(self, device: torch.device, steps: int = STEPS) -> None:
        self._device, self._on_host, self._left = device, not gpu.is_gpu(device), steps
        self._profile: Any = None
        self._ends: list[int] = []
        self._data: list[tuple[int, int]] = []
        self._fetch = 0
        self._none = ""

    @property
    def is_running(self) -> bool:
        """Whether its steps have begun and are not all over."""
        return bool(self._ends) and self._left > 0

    def begin(self) -> None:
        """With the next step."""

        def started() -> Any:
            started = profile(activities=[gpu.profiled(self._device)])
            started.start()
            return started

        self._profile = self._tried(started)
        # A profiler takes longer to start on one rank than on another, and the others' first step would wait for it.
        if dist.is_initialized():
            dist.barrier(device_ids=gpu.barrier_devices(self._device))
        self._ends.append(time.time_ns())

    def fetch_begins(self) -> None:
        """Of a step's batches; a Trainer that does not say so fetches from the last step's end on."""
        if self.is_running:
            self._fetch = time.time_ns()

    def batch_arrived(self) -> None:
        """All of a step, or its first; the first word counts."""
        if self.is_running and len(self._data) < len(self._ends):
            self._data.append((max(self._fetch, self._ends[-1]), time.time_ns()))

    def end_step(self) -> bool:
        """Whether that was the last one."""
        self._ends.append(time.time_ns())
        self._left -= 1
        if self._left == 0:
            gpu.wait(self._device)
            self._stop()  # steps that come after these are not its
        return self._left == 0

    def trace(self, error: BaseException | None = None) -> Trace:
        """What was seen, once its steps are over; ``error`` is what has ended them early."""
        if error is not None and self.is_running:
            self._stop()
            self._none = f"a traced step failed ({said(error)})"
        started = self._profile
        if self._none or started is None:
            return Trace(none=self._none or "it was not begun")
        found = self._tried(lambda: self._read(started))
        return Trace(none=self._none) if found is None else found

    def _stop(self) -> None:
        if self._profile is not None:
            self._tried(self._profile.stop)

    def _read(self, stopped: Any) -> Trace:
        found = read(stopped.profiler.kineto_results.events(), on_host=self._on_host)
        try:
            return step_trace(found, Marks(self._ends, self._data), on_host=self._on_host)
        except IncompleteTraceError as incomplete:
            is_refused = not found.work and not self._on_host
            return Trace(none=f"{incomplete}; {_OTHER_CLIENT}" if is_refused else str(incomplete))

    def _tried(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - whatever a profiler may raise, what was measured stands
            self._none = self._none or f"the profiler failed ({said(error)})"
            return None


def said(error: BaseException) -> str:
    """In one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Fetches:
    """When a rank's host was inside its loader, step by step.

    Tells ``tracer`` of traced steps' fetches; those of timed ones are timed only where workers fetch ahead:
    what workers have kept ready while nobody trained, between timed and traced steps, a trace takes for speed.
    """

    def __init__(self, tracer: Tracer | None, *, ahead: bool) -> None:
        self.seconds: list[float] = []
        """Of each step from the first one on; empty unless workers fetch ahead."""
        self._tracer, self._ahead = tracer, ahead
        self._start: float | None = None

    def begin(self) -> None:
        """A step's batches are asked for."""
        if self._tracer:
            self._tracer.fetch_begins()
        if self._ahead:
            self._start = time.perf_counter()

    def end(self) -> None:
        """They are there; also where that was said before."""
        if self._start is not None:
            self.seconds.append(time.perf_counter() - self._start)
            self._start = None
        if self._tracer:
            self._tracer.batch_arrived()


def with_timed_waits(trace: Trace, fetched: Sequence[float], step_seconds: Sequence[float], warmup_steps: int) -> Trace:
    """``trace`` with the waits for data of the timed steps, whose fetches took ``fetched``; with none, as it is.

    While the host is inside the loader a device may still have work: it waits for no longer than it is idle.
    """
    # A mean: of several workers one is late, and the next ones' batches have come meanwhile.
    steps = list(zip(fetched, step_seconds, strict=False))[warmup_steps:]
    if not (trace and steps):
        return trace
    waited = fmean(fetch for fetch, _ in steps)
    if not trace.is_on_host:
        waited = min(waited, max(0.0, fmean(step for _, step in steps) - trace.busy_seconds))
    return replace(trace, data_seconds=waited, step_seconds=trace.step_seconds - trace.data_seconds + waited)
