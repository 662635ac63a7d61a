"""SideBySide: trials at the same time, one on each GPU that is free; on one GPU, or a CPU, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue

from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.engine.tuning.trials import Trials
from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.observer import LaunchObserver, Observer
from pytest_llmperf.run.trial_store import TrialStore
from pytest_llmperf.spec.train_spec import TrainSpec


class _StoppedError(Exception):
    """Nobody waits for this launch any more."""


class SideBySide:
    """So many at once, each by a caller with servers of its own."""

    def __init__(self, caller: Caller, store: TrialStore, most: int, most_seconds: float) -> None:
        """``most`` at once; ``most_seconds`` of one."""
        self._caller, self._most = caller, most
        self._stop = threading.Event()
        contexts = [caller.context, *(caller.context.beside() for _ in range(most - 1))]
        observer = _Stoppable(caller.observer, self._stop) if most > 1 else caller.observer
        self._callers = [replace(caller, context=one, observer=observer, findings=Findings()) for one in contexts]
        self._free: SimpleQueue[Trials] = SimpleQueue()
        for one in self._callers:
            trials = Trials(one, store, most_seconds)
            trials.while_waiting(self._stop_where_nobody_waits)
            self._free.put(trials)
        self._pool = ThreadPoolExecutor(most) if most > 1 else None
        self._running: dict[Future[Trial], TrainSpec] = {}
        self._done: list[tuple[TrainSpec, Trial]] = []

    @property
    def has_room(self) -> bool:
        """Whether another can begin at once."""
        return len(self._running) + len(self._done) < self._most

    @property
    def running(self) -> Sequence[TrainSpec]:
        """What was begun and not told of."""
        return [*self._running.values(), *(spec for spec, _ in self._done)]

    def begin(self, spec: TrainSpec, until: float) -> None:
        """Launch ``spec``, which is ended then; where one is launched after the other this returns at its end."""
        if self._pool is None:
            self._done.append((spec, self._made(spec, until)))
        else:
            self._running[self._pool.submit(self._made, spec, until)] = spec

    def finished(self) -> Iterator[tuple[TrainSpec, Trial]]:
        """Those that have ended since this was asked; one at least, if any was begun."""
        done, self._done = self._done, []
        yield from done
        if self._running and not done:
            ended, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for one in ended:
                yield self._running.pop(one), one.result()

    def close(self) -> None:
        """End what runs, with the servers of its own."""
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for one in self._callers:
            self._caller.findings.spent += one.findings.spent
            if one.context is not self._caller.context:
                one.context.close()

    def _stop_where_nobody_waits(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _made(self, spec: TrainSpec, until: float) -> Trial:
        trials = self._free.get()
        try:
            return trials.make(spec, until)
        finally:
            self._free.put(trials)


class _Stoppable:
    """An observer of launches that a thread waits for: Ctrl-C reaches the main thread alone."""

    def __init__(self, observer: Observer, stop: threading.Event) -> None:
        self._observer, self._stop = observer, stop

    def say(self, line: str) -> None:
        self._observer.say(line)

    @contextmanager
    def launch(self, spec_id: str, number: int, launches: int) -> Iterator[_StoppableLaunch]:
        with self._observer.launch(spec_id, number, launches) as live:
            yield _StoppableLaunch(live, self._stop)

    def ended_from_outside(self, error: BaseException) -> str:
        if isinstance(error, _StoppedError):
            return "the search was ended"
        return self._observer.ended_from_outside(error)


class _StoppableLaunch:
    def __init__(self, live: LaunchObserver, stop: threading.Event) -> None:
        self._live, self._stop = live, stop

    def update(self, progress: Progress) -> None:
        if self._stop.is_set():
            raise _StoppedError
        self._live.update(progress)

    def finished(self, launch: Launch) -> None:
        self._live.finished(launch)

    def clear(self) -> None:
        with suppress(_StoppedError):
            self._live.clear()
