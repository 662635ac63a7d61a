"""Runner: one launch of one spec, on leased hardware, shown while it runs; once more where circumstances spoilt it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pytest_llmperf.judge.validity import Circumstances, neighbours
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import want_of_room
from pytest_llmperf.launch.outcome import LONGER, broken_off
from pytest_llmperf.launch.request import LaunchRequest, refused_early, unkept_calibrations
from pytest_llmperf.launch.site import OutOfTimeError, listed
from pytest_llmperf.launch.watch import Meter
from pytest_llmperf.records.failure import FAILED, OTHER, SOAKED, WAITING, Failure, LaunchFailed, Progress, accounted
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.findings import UNFINISHED, CaseFailedError, LaunchObserver, RunEndedError
from pytest_llmperf.settings.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Whose a launch is, where several sides take turns and each is launched as often as the others."""

    python: str = sys.executable
    sides: int = 1
    side: str = ""
    """To people, where its spec does not tell."""
    launches: int = 0
    """How many there will be, where that is known beforehand."""
    tree: Path | None = None
    """The project at another revision, where a script runs there."""


class Runner:
    def __init__(self, caller: Caller, *, bare: bool = False) -> None:
        """``bare``: nothing after the timed steps of its launches is traced or inspected."""
        self._run, self._observer, self._findings, self._is_bare = caller.run, caller.observer, caller.findings, bare
        self.most_seconds = math.inf  # that a launch may take, whatever the run allows
        self.folder = Path()  # of its last launch
        self._held: tuple[Gpu, ...] | None = None
        self._held_after = self.seconds = 0.0
        """The second: for which its launches ran."""

    @contextmanager
    def hold(self, num_gpus: int) -> Iterator[None]:
        """Keep the same hardware for every launch inside: turns are taken in one place."""
        meter = Meter()
        with self._lease(num_gpus, meter) as gpus:
            self._held, self._held_after = gpus, meter.waited_seconds
            try:
                yield
            finally:
                self._held = None

    def launch(
        self,
        spec: Spec,
        number: int,
        turn: Turn | None = None,
        *,
        soak_seconds: float = 0.0,
        calibrates: Callable[[Sequence[Gpu]], bool] = lambda _: False,
        **asked: Any,
    ) -> Launch | Failure:
        """Launch ``spec``; ``number`` counts the launches of this case from 1. It may end once it is known to be one of
        ``passing``, unless it takes ``all_steps``, which may be ``asked`` of its request, or is ended after
        ``soak_seconds``. ``calibrates`` says of its GPUs, of none where srun chooses them, whether they are calibrated
        in it. A ``CaseFailedError`` where this host's memory cannot hold it, a ``RunEndedError`` where no time, or no
        node, is left."""
        run, turn = self._run, turn or Turn()
        rounds = max(math.ceil(number / turn.sides), run.settings.launches)
        numbers = number, max(turn.launches, turn.sides * rounds)
        run.settle(spec)
        if spec.is_script and run.settings.memory_limit_bytes and not run.on_cpu:
            raise CaseFailedError(f"{spec.id}: --perf-memory-limit holds no script on a GPU; leave it out")
        if run.on_cpu and run.site.is_here and (why := want_of_room(spec)):
            raise CaseFailedError(why)
        if refusal := refused_early(spec):
            return refusal
        asked |= {"python": turn.python, "tree": turn.tree}
        if soak_seconds:
            asked |= {"soak_seconds": soak_seconds, "timeout_seconds": run.launch_seconds + soak_seconds}
        with self.attempt(spec, f"{spec.id} {turn.side}".rstrip(), numbers, calibrates=calibrates, **asked) as attempt:
            attempt.outcome = run.site.launch(attempt.request, attempt.watch, self._observer.say)
        outcome: Launch | Failure = attempt.outcome
        if isinstance(outcome, Launch):
            is_news = attempt.request.calibrations is not None and not run.has_told_unkept
            if is_news and (why := unkept_calibrations(run.run_folder)):
                run.has_told_unkept = True
                self._observer.say(
                    f"calibrations of GPUs cannot be kept in {why}; each run makes its own, some seconds for each GPU "
                    "(LLMPERF_CACHE_DIR names another cache)"
                )
        elif outcome.lost_nodes and run.settings.resume:  # else nobody would go on with it
            lost = f"node {listed(outcome.lost_nodes)} failed"
            self._end(f"{lost}, and {spec.id} was not judged: {outcome.message}", UNFINISHED)
        return outcome

    def record(self, spec: Spec, number: int, turn: Turn | None = None) -> Launch:
        """The record of a launch; ``LaunchFailed`` where it yielded none."""
        outcome = self.launch(spec, number, turn)
        if isinstance(outcome, Failure):
            raise LaunchFailed(spec.id, outcome)
        return outcome

    def soak(
        self, case_id: str, spec: Spec, seconds: float, judged: Callable[[str], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """What is ``judged`` of a launch that takes steps of ``spec`` for so long, and why it ended before; with that a
        ``LaunchFailed`` where it did."""
        outcome = self.launch(spec, 1, all_steps=True, soak_seconds=seconds)
        if isinstance(outcome, Launch):
            raise TypeError(f"{spec.id}: a launch without an end has left a record")
        why = "" if outcome.kind == SOAKED else outcome.reason
        seen = {**judged(why)}
        seen["notes"] = (*seen.get("notes", ()), *neighbours(outcome.health))
        if why:
            raise LaunchFailed(case_id, outcome, **seen)
        return seen

    @contextmanager
    def attempt(
        self,
        spec: Spec,
        shown: str,
        numbers: tuple[int, int] = (1, 1),
        *,
        shared: bool = False,
        calibrates: Callable[[Sequence[Gpu]], bool] = lambda _: False,
        **asked: Any,
    ) -> Iterator[_Attempt]:
        """Hardware, and a request of what is ``asked``; what it cost is counted; what ends it from outside fails it."""
        run, meter = self._run, Meter()
        with self._lease(spec.gpus, meter, shared=shared) as gpus, self._observer.launch(shown, *numbers) as live:
            request = replace(self._request(spec, gpus, meter), **asked)
            request = request.calibrating() if calibrates(gpus) else request
            attempt, self.folder = _Attempt(request, live), request.folder
            try:
                yield attempt
                attempt.ended(run.settings.timeout_seconds)
            except OutOfTimeError as error:
                live.clear()
                self._end(str(error), UNFINISHED)
            except KeyboardInterrupt:
                live.clear()
                self._observer.say(f"{spec.id}: interrupted; what its launches left is in {request.folder.parent}")
                raise
            except BaseException as error:
                if not (why := self._observer.ended_from_outside(error)):
                    raise
                live.clear()
                attempt.outcome = attempt.broken_off = broken_off(request.folder, why, attempt.last)
            finally:
                self.seconds += meter.seconds
                self._findings.spend(
                    launches=1 if meter.seconds else 0,  # else nothing was started
                    phases=attempt.phases(),
                    gpu_seconds=(0 if run.on_cpu else spec.gpus) * meter.seconds,
                )
            if isinstance(attempt.outcome, Launch):
                live.finished(attempt.outcome)
            else:
                live.clear()

    def _request(self, spec: Spec, gpus: tuple[Gpu, ...], meter: Meter) -> LaunchRequest:
        run = self._run
        return LaunchRequest(
            spec=spec,
            folder=run.launch_folder(spec.id),
            gpus=gpus,
            timeout_seconds=min(self.most_seconds, run.launch_seconds),
            memory_limit_bytes=run.settings.memory_limit_bytes,
            trace=run.settings.trace and not self._is_bare,
            inspect=not self._is_bare,
            meter=meter,
            warm=None if spec.is_script else run.site.warm_start(self._observer.say),
            root=run.rootdir,
        )

    def _end(self, why: str, exit_code: int) -> NoReturn:
        self._run.unfinished, self._run.ends_with = why, exit_code
        raise RunEndedError(why, exit_code)

    @contextmanager
    def _lease(self, num_gpus: int, meter: Meter, *, shared: bool = False) -> Iterator[tuple[Gpu, ...]]:
        if self._held is not None:
            # What was waited for once is the first launch's to tell.
            meter.waited_seconds, self._held_after = self._held_after, 0.0
            yield self._held[:num_gpus]
            return
        usable = () if self._run.on_cpu else self._run.gpus
        with ExitStack() as held:
            try:  # around the lease alone: an OSError of the launch is none of its
                with meter.waiting():
                    lease = self._run.site.lease(num_gpus, usable, self._observer.say, shared=shared, wait=self._waits)
                    gpus = held.enter_context(lease)
            except OSError as error:
                raise CaseFailedError(str(error)) from None
            except BaseException as error:
                self._findings.spend(phases={WAITING: meter.waited_seconds})
                why = self._observer.ended_from_outside(error)
                if isinstance(error, KeyboardInterrupt) and not why:
                    self._observer.say("interrupted while it waited for hardware that others hold: nothing is lost")
                if not why:
                    raise
                raise CaseFailedError(f"{why}, while it waited for hardware that others hold") from None
            yield gpus

    def _waits(self, what: str) -> None:
        if time.monotonic() >= self._run.until:
            why = f"its time was over while it waited for {what}, which another launch here holds"
            raise RunEndedError(why, UNFINISHED)


class _Attempt:
    def __init__(self, request: LaunchRequest, live: LaunchObserver) -> None:
        self.request, self._live = request, live
        self.outcome: Any = None
        """A record, or errors of trainings, or else the failure."""
        self.last = Progress(phase="starting")
        self.broken_off: Failure | None = None
        """Why somebody else ended it, a test's time limit say."""

    def watch(self, progress: Progress) -> None:
        self.last = progress
        self._live.update(progress)

    def ended(self, allowed_seconds: float) -> None:
        """Where what is left of a search or a run was the limit, no option makes it longer."""
        outcome = self.outcome
        if isinstance(outcome, Launch) and outcome.phases:  # which have the wait for hardware
            waited = round(self.request.meter.waited_seconds, 3)
            self.outcome = replace(outcome, phases={WAITING: waited, **outcome.phases})
        if isinstance(outcome, Failure) and self.request.timeout_seconds < allowed_seconds:
            self.outcome = replace(outcome, message=outcome.message.removesuffix(LONGER))

    def phases(self) -> Mapping[str, float]:
        """Where its seconds went, as far as a record tells."""
        meter, record, remainder = self.request.meter, dict[str, float](), self.request.takes
        if isinstance(self.outcome, Launch):
            record, remainder = dict(self.outcome.phases), FAILED if self.outcome.phases else OTHER
        return accounted(record, meter.waited_seconds, meter.seconds, remainder)


# What spoilt a launch (heat, somebody else's job) is seldom gone at once.
_PAUSE_SECONDS = 20.0


class LaunchRetry:
    """The launches of one case. One that circumstances spoilt is set aside and tried once more, later; once a case."""

    def __init__(self, runner: Runner, say: Callable[[str], None]) -> None:
        self._runner, self._say = runner, say
        self.set_aside: tuple[str, ...] = ()
        """Why a launch was set aside."""
        self.spoilt: tuple[str, ...] = ()
        """Why launches are no good that count all the same, because the retry was spoilt too."""
        self._drifts = ""

    @property
    def notes(self) -> tuple[str, ...]:
        set_aside = f"one launch was set aside: {self.set_aside[0]}" if self.set_aside else ""
        return tuple(filter(None, [set_aside, self._drifts]))

    def launch(self, spec: Spec, number: int, circumstances: Callable[[Launch], Circumstances], **how: Any) -> Launch:
        """One launch of ``spec``, made as a runner does it; ``LaunchFailed``: it yielded no record."""

        def launched() -> tuple[Launch | Failure, Circumstances]:
            outcome = self._runner.launch(spec, number, **how)
            if isinstance(outcome, Launch):
                return outcome, circumstances(outcome)
            # Of what makes a launch fail, memory alone is what a neighbour takes.
            return outcome, Circumstances(neighbours(outcome.health) if outcome.kind == "oom" else ())

        outcome, around = launched()
        if around.all_lines and not self.set_aside:
            self.set_aside = around.all_lines
            self._say(f"{spec.id}: {self.set_aside[0]}; set aside, launched once more in {_PAUSE_SECONDS:.0f} s")
            time.sleep(_PAUSE_SECONDS)
            if around.drift and not spec.is_script:  # nobody knows whether a script makes more steps
                # It is given more of them, and what passes with its own says nothing of these.
                least = min(spec.min_steps, spec.steps)
                spec, how = spec.changed(steps=2 * spec.steps, min_steps=2 * least), how | {"passing": None}
            outcome, around = launched()
        if spec.is_script and around.drift:  # what is exact of it holds all the same, and its speed by what scatters
            self._drifts = f"{around.drift}: its speed is held by the more; give more steps= if it makes them"
            around = replace(around, drift="")
        self.spoilt = (*self.spoilt, *around.all_lines)
        if isinstance(outcome, Failure):
            raise LaunchFailed(spec.id, outcome)
        return outcome
