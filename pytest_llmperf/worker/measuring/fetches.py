"""Fetches: when a rank's host was inside its loader, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from pytest_llmperf.records.trace import Trace
from pytest_llmperf.worker.tracing.tracer import Tracer


class Fetches:
    """Tells ``tracer`` of traced steps' fetches; those of timed ones are timed only where workers fetch ahead.

    What workers have kept ready while nobody trained, between timed and traced steps, a trace takes for speed.
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
