"""TrialStage: a search by trials over configurations of one width, until none is worth its seconds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue

from pytest_llmperf.judge.tuning_objective import Objective
from pytest_llmperf.judge.tuning_search import AUTOTUNED, COMPILED, PLAIN, Field, Outcome, Search
from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.findings import CaseFailedError, Findings, LaunchObserver, Observer
from pytest_llmperf.run.search_store import TrialStore
from pytest_llmperf.run.tuning.forecast import MemoryForecast, by_settings
from pytest_llmperf.run.tuning.trials import STEPS, Trials, Tried
from pytest_llmperf.settings.attention import is_compiled_alone
from pytest_llmperf.settings.batch import SIZE
from pytest_llmperf.settings.compilation import is_compiled, times_kernels
from pytest_llmperf.settings.space import traits
from pytest_llmperf.settings.train_spec import TrainSpec, known_failure


class _StoppedError(Exception):
    """The search has ended, and with it this launch."""


class SideBySide:
    """So many trials at once, each by a caller with servers of its own; on one GPU, or a CPU, one after the other."""

    def __init__(self, caller: Caller, store: TrialStore, most: int, most_seconds: float) -> None:
        """``most`` at once; ``most_seconds`` of one."""
        self._caller, self._most = caller, most
        self._stop = threading.Event()
        runs = [caller.run, *(caller.run.beside() for _ in range(most - 1))]
        observer = _Stoppable(caller.observer, self._stop) if most > 1 else caller.observer
        self._callers = [replace(caller, run=one, observer=observer, findings=Findings()) for one in runs]
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
        """What was begun and not yet finished."""
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
            if one.run is not self._caller.run:
                one.run.close()

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


# While one is launched, the memory of so many that may come next is predicted.
_AHEAD = 6
# Seconds that a trial may take of those that were kept for the end.
_OVERTIME = 10.0


def compiles(spec: TrainSpec) -> int:
    """How much a launch of it does, as ``TrialCosts`` counts that; flex attention has a compiler of its own."""
    if times_kernels(spec):
        return AUTOTUNED
    return COMPILED if is_compiled(spec) or is_compiled_alone(spec) else PLAIN


@dataclass(frozen=True)
class Prior:
    """What is known of configurations before any of them is tried."""

    logs: Sequence[float] | None = None
    """What each costs, as far as it can be counted or others tell: logarithms, up to a constant."""
    recipes: Sequence[Sequence[TrainSpec]] = ()
    """The first of each that fits is tried before all others."""
    least: TrainSpec | None = None
    """What takes the least memory, and fits, where the first of all does not: it is tried in its place."""


class TrialStage:
    """The trials of one search."""

    def __init__(
        self,
        objective: Objective,
        specs: Sequence[TrainSpec],
        forecast: MemoryForecast,
        tell: Callable[[TrialStage, str], None],
        prior: Prior | None = None,
    ) -> None:
        """``tell`` hears of each trial as it begins, with words, and as it ends, without."""
        prior = prior or Prior()
        self.specs, self._objective, self._forecast, self._tell = tuple(specs), objective, forecast, tell
        self.numbers = {spec: number for number, spec in enumerate(self.specs)}
        beginnings = [[self.numbers[spec] for spec in one if spec in self.numbers] for one in prior.recipes]
        field = Field(
            traits=traits(self.specs),
            size=SIZE,
            tokens=[spec.sequences_per_step * spec.sequence_length for spec in self.specs],
            compiles=[compiles(spec) for spec in self.specs],
            prior=prior.logs,
            beginnings=[numbers for numbers in beginnings if numbers],
        )
        self.search = Search(field, STEPS)
        self._instead = self.numbers.get(prior.least) if prior.least is not None else None
        self._until = math.inf
        self.tried: list[Tried] = []
        self._running: set[int] = set()
        self.too_large: set[int] = set()
        # Told of as a reason; whoever wants one can name it in a space of its own.
        self.known_to_fail = [spec for spec in self.specs if known_failure(spec)]
        if len(self.known_to_fail) < len(self.specs):
            self.search.excluded |= {self.numbers[spec] for spec in self.known_to_fail}

    def run(self, trials: SideBySide, until: float, end_seconds: Callable[[], float]) -> None:
        """Trials, by ``trials``, as long as there is time for them before ``until`` and what comes after them.

        The first one is made however little time there is.
        """
        self._until = until
        try:
            while True:
                while trials.has_room and (number := self._next(until - time.monotonic() - end_seconds())) is not None:
                    self._tell(self, f"trial of {self.specs[number].id}")
                    self.search.excluded.add(number)  # as long as it runs
                    self._running.add(number)
                    trials.begin(self.specs[number], until - end_seconds() + _OVERTIME)
                if not trials.running:
                    return
                for spec, trial in trials.finished():
                    self.search.excluded.discard(self.numbers[spec])
                    self._running.discard(self.numbers[spec])
                    # Where the time of all is over, nothing is to blame.
                    self.note(Tried(spec, trial), is_late=until - time.monotonic() > end_seconds())
                    if trial.kind == "never-started":
                        raise CaseFailedError(f"{spec.id}: {trial.failure}")
        finally:  # what was ended before its end is left to be tried
            self.search.excluded -= self._running
            self._running.clear()

    @property
    def best(self) -> Tried | None:
        """The best of those measured."""
        order = self.search.in_order()
        spec = self.specs[order[0]] if order else None
        return next((one for one in reversed(self.tried) if one.spec == spec), None)

    def _next(self, seconds: float) -> int | None:
        if seconds <= 0 and (self.tried or self.search.excluded - self.too_large):
            return None
        if self._instead is not None and not self.tried and not self._running:
            return self._instead
        if self.tried and all(one.trial.is_too_large for one in self.tried) and not self.too_large:
            # Next of all what asks for the least: where that ran out of memory too nothing fits.
            number = self.numbers[by_settings(self.specs)]
            if number in self.search.outcomes:
                self.too_large |= set(self.search.left)
                self.search.excluded |= self.too_large
            return number if number in self.search.left else None
        while True:
            found, is_new = self._first_that_fits(max(seconds, 0.0))
            if found is not None or not is_new:
                return found

    def _first_that_fits(self, seconds: float) -> tuple[int | None, bool]:
        """The most promising one, and whether others were found not to fit: then there may be more to look at.

        The memory of what may come next is predicted beside the launch of this one.
        """
        ahead, found, is_new = list[TrainSpec](), None, False
        for number in self.search.promising(seconds):
            if found is not None:
                ahead.append(self.specs[number])
            elif self._forecast.fits(self.specs[number]):
                found = number
            else:
                self.too_large.add(number)
                self.search.excluded.add(number)
                is_new = True
                if time.monotonic() >= self._until:
                    return None, False
            if len(ahead) == _AHEAD:
                break
        self._forecast.ask(ahead)
        return found, is_new

    def put_off(self) -> Mapping[str, int]:
        """How many of those left were to come after all others, by what they have in common with one that was late."""
        found = {}
        for number, count in self.search.put_off().items():
            spec = self.specs[number]
            trial = next(place for place, one in enumerate(self.tried, 1) if one.spec == spec)
            blamed = self.search.timeouts.blamed[number]
            words = ", ".join(name if value is True else f"{name}={value}" for name, value in blamed.items())
            found[f"with {words} as {spec.id}, which ran out of its time in trial {trial}"] = count
        return found

    def note(self, tried: Tried, *, is_late: bool = False) -> None:
        """Learn from a trial; ``is_late``: one whose time was over had all that one may take."""
        spec, trial = tried.spec, tried.trial
        self.tried.append(tried)
        ran_out = trial.wall_seconds if is_late and trial.kind == "timeout" else 0.0
        is_spoilt = bool(trial.disturbances)
        outcome = Outcome(self._objective.log_of(trial), trial.step_error, ran_out, is_spoilt)
        self.search.tell(self.numbers[spec], outcome)
        if trial.is_measured and not tried.was_kept:
            outside = trial.wall_seconds - trial.steps * trial.step_seconds
            self.search.costs.learn(compiles=compiles(spec), outside_seconds=max(0.0, outside))
        if not is_spoilt:
            self._forecast.learn(spec, trial)
        self._tell(self, "")
