"""Runner: one launch of one spec, on hardware leased for it, shown while it runs."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import host_memory_bytes
from pytest_llmperf.launch.outcome import LONGER, broken_off, sizes_so_far
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.launch.site import OutOfTimeError, listed
from pytest_llmperf.launch.watch import Meter
from pytest_llmperf.records.batch_size_search import Search
from pytest_llmperf.records.calibration import OF_THE_RUN, UNKEPT
from pytest_llmperf.records.failure import Failure, LaunchFailed, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.launch_end import PassingRanges
from pytest_llmperf.records.parity import ParityOrder, TrainingErrors
from pytest_llmperf.records.phases import COMPARING, FAILED, OTHER, SEARCHING, WAITING, accounted
from pytest_llmperf.records.result import Spent
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.errors import CaseFailedError, RunEndedError
from pytest_llmperf.run.findings import LaunchObserver
from pytest_llmperf.run.preconditions import need_room
from pytest_llmperf.run.result_cache import MadeTrainings
from pytest_llmperf.run.run import OVER_BUDGET, UNFINISHED
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.folders import cache_folder

_Outcome = TypeVar("_Outcome", bound="Launch | Failure | list[TrainingErrors]")

# File systems allow 255 bytes, and a number follows.
_LONGEST_NAME = 200


@dataclass(frozen=True)
class Turn:
    """Whose a launch is, where several sides take turns and each is launched as often as the others."""

    python: str = sys.executable
    sides: int = 1
    side: str = ""
    """What names it to people."""
    launches: int = 0
    """How many there will be, where that is known beforehand."""


class Runner:
    """Launches specs for one caller."""

    def __init__(self, caller: Caller, *, bare: bool = False) -> None:
        """``bare``: its launches are of the steps that are timed, and nothing after them is traced or inspected."""
        self._run, self._observer, self._findings = caller.run, caller.observer, caller.findings
        self._is_bare = bare
        self.most_seconds = math.inf
        """That a launch may take, whatever the run allows."""
        self.while_waiting: Callable[[], None] = lambda: None
        """Called again and again while hardware is waited for; what it raises ends the wait."""
        self._held: tuple[Gpu, ...] | None = None
        self._held_after = 0.0
        self.seconds = 0.0
        """For which its launches ran."""

    @contextmanager
    def hold(self, num_gpus: int) -> Iterator[None]:
        """Keep the same hardware for every launch inside: what takes turns must take them in one place."""
        meter = Meter()
        with self._lease(num_gpus, meter) as gpus:
            self._held, self._held_after = gpus, meter.waited_seconds
            try:
                yield
            finally:
                self._held = None

    def launch(  # noqa: PLR0913 - the facts of one launch
        self,
        spec: TrainSpec,
        number: int,
        turn: Turn | None = None,
        passing: PassingRanges | None = None,
        *,
        all_steps: bool = False,
        calibrates: Callable[[Sequence[Gpu]], bool] = lambda _: False,
    ) -> Launch | Failure:
        """Launch ``spec``; ``number`` counts the launches of this case from 1, and ``turn`` says whose turn it is.

        It may end once it is known to be one of ``passing``, unless it takes ``all_steps``. ``calibrates`` says of its
        GPUs, of none where srun chooses them, whether it is with what these give that day to work that never changes.

        Raises:
            CaseFailedError: this host's memory cannot hold it.
            RunEndedError: no time, or no node, is left for it.
        """
        turn, meter = turn or Turn(), Meter()
        rounds = max(math.ceil(number / turn.sides), self._run.settings.launches)
        total = max(turn.launches, turn.sides * rounds)
        name = f"{spec.id} {turn.side}".rstrip()
        self._run.settle(spec)
        if self._run.on_cpu and self._run.site.is_here:
            need_room(spec, host_memory_bytes())
        with self._lease(spec.gpus, meter) as gpus, self._observer.launch(name, number, total) as live:
            calibrate = calibrates(gpus)
            request = replace(
                self._request(spec, gpus, meter, python=turn.python),
                passing=passing,
                all_steps=all_steps,
                calibrations=cache_folder("calibrations") if calibrate else None,
            )
            outcome: Launch | Failure | None = None
            with self._watched(request, live) as watched:
                outcome = watched.ended(self._run.site.launch(request, watched.watch, self._observer.say))
                outcome = self._by_its_limit(outcome, request)
            outcome = watched.broken_off or outcome
            if isinstance(outcome, Launch):
                live.finished(outcome)
                if calibrate:
                    self._tell_unkept()
            elif outcome.lost_nodes and self._run.settings.resume:  # else nobody would go on with it
                lost = f"node {listed(outcome.lost_nodes)} failed"
                self._end(f"{lost}, and {spec.id} was not judged: {outcome.message}", UNFINISHED)
        return outcome

    def sizes(self, spec: TrainSpec, search: Search, tell: Callable[[Search], None]) -> list[tuple[int, int | None]]:
        """The micro-batch sizes that one process tried, each with its peak allocated bytes or none; on this machine.

        ``tell`` hears how far it is.

        Raises:
            LaunchFailed: it ended by an error, and not for lack of memory or time.
        """
        name, meter = f"{spec.capacity_id} sizes", Meter()
        with self._lease(spec.gpus, meter) as gpus, self._observer.launch(name, 1, 1) as live:
            request = self._request(spec, gpus, meter, search=search)

            def tell_so_far() -> None:
                so_far = Search()
                for size, peak in sizes_so_far(request.folder):
                    so_far.note(size, peak)
                tell(so_far)

            outcome: list[tuple[int, int | None]] | Failure = []
            with self._watched(request, live, tell_so_far) as watched:
                outcome = self._run.site.sizes(request, watched.watch)
        if watched.broken_off is not None:  # whoever ended it wants no more of it, whatever it has tried
            raise LaunchFailed(spec.id, watched.broken_off)
        if not isinstance(outcome, Failure):
            return outcome
        tried = sizes_so_far(request.folder) if outcome.kind == "timeout" else []
        if outcome.kind not in {"oom", "killed"} and not tried:
            raise LaunchFailed(spec.capacity_id, outcome)
        # It may have had too much to do, it may hang, and what killed it may have been memory: its logs tell.
        if tried or outcome.kind == "killed":
            self._observer.say(f"{spec.capacity_id}: {outcome.message}; logs: {outcome.folder}")
        return tried  # nothing, where even the process was lost: fresh launches search alone

    def small_trainings(self, spec: TrainSpec, order: ParityOrder) -> MadeTrainings:
        """What the small trainings that ``order`` asks for did, in one launch on this machine.

        Raises:
            LaunchFailed: nothing is known of them.
        """
        meter = Meter()
        side = "parity" if order.truth else "the plain form's parity"
        leased = self._lease(spec.gpus, meter, shared=True)  # nobody times them
        with leased as gpus, self._observer.launch(f"{spec.id} {side}", 1, 1) as live:
            request = replace(self._request(spec, gpus, meter), parity=order, trace=False)
            outcome: list[TrainingErrors] | Failure = []
            with self._watched(request, live) as watched:
                outcome = self._run.site.training_errors(request, watched.watch)
                outcome = self._by_its_limit(outcome, request)
            live.clear()
        outcome = watched.broken_off or outcome
        if isinstance(outcome, Failure):
            raise LaunchFailed(spec.id, outcome)
        return MadeTrainings(str(request.folder), tuple(outcome))

    def _tell_unkept(self) -> None:
        """Say, once a run, why calibrations cannot be kept from run to run, where they cannot."""
        if self._run.has_told_unkept:
            return
        with suppress(OSError, ValueError):
            why = (self._run.run_folder / OF_THE_RUN / UNKEPT).read_text(encoding="utf-8").strip()
            self._run.has_told_unkept = True
            self._observer.say(
                f"calibrations of GPUs cannot be kept in {why}; each run makes its own, some seconds for each GPU "
                "(LLMPERF_CACHE_DIR names another cache)"
            )

    def _by_its_limit(self, outcome: _Outcome, request: LaunchRequest) -> _Outcome:
        """``outcome``; where what is left of a search or a run was the limit, no option makes it longer."""
        if not isinstance(outcome, Failure) or request.timeout_seconds >= self._run.settings.timeout_seconds:
            return outcome
        return replace(outcome, message=outcome.message.removesuffix(LONGER))

    @contextmanager
    def _watched(
        self, request: LaunchRequest, live: LaunchObserver, tell: Callable[[], None] = lambda: None
    ) -> Iterator[_Watched]:
        """Around one launch: what it cost is counted, and what ends it from outside is a failure of its own."""
        watched = _Watched(live, request.meter, tell)
        # What the seconds of a launch without a record went to.
        spent_on = COMPARING if request.parity else SEARCHING if request.search else FAILED
        try:
            self._run.job.note_spent()  # should the node die now, no more than this launch is forgotten
            yield watched
        except OutOfTimeError as error:
            live.clear()
            self._end(str(error), OVER_BUDGET if error.over_budget else UNFINISHED)
        except KeyboardInterrupt:
            live.clear()
            self._observer.say(f"{request.spec.id}: interrupted; its logs are in {request.folder}")
            raise
        except BaseException as error:
            why = self._observer.ended_from_outside(error)
            if not why:
                raise
            live.clear()
            watched.broken_off = broken_off(request.folder, why, watched.last)
        finally:
            seconds = request.meter.seconds
            self.seconds += seconds
            gpus = 0 if self._run.on_cpu else request.spec.gpus
            self._findings.spent += Spent(
                launches=1 if seconds else 0,  # else nothing was started
                phases=watched.phases(spent_on),
                gpu_seconds=gpus * seconds,
            )

    def _end(self, why: str, exit_code: int) -> NoReturn:
        """End the run before its end; what is known is written."""
        self._run.unfinished, self._run.ends_with = why, exit_code
        raise RunEndedError(why, exit_code)

    def _request(
        self,
        spec: TrainSpec,
        gpus: tuple[Gpu, ...],
        meter: Meter,
        *,
        python: str = sys.executable,
        search: Search | None = None,
    ) -> LaunchRequest:
        settings = self._run.settings
        return LaunchRequest(
            spec=spec,
            folder=self._folder(spec),
            gpus=gpus,
            timeout_seconds=min(self.most_seconds, self._run.launch_seconds),
            python=python,
            memory_limit_bytes=settings.memory_limit_bytes,
            search=search,
            trace=settings.trace and not self._is_bare,
            inspect=not self._is_bare,
            meter=meter,
            warm=self._run.site.warm_start(self._observer.say),
        )

    def _folder(self, spec: TrainSpec) -> Path:
        home, name = self._run.run_folder, _file_name(spec.id)
        return home / f"{name}-{1 + sum(1 for _ in home.glob(f'{name}-*'))}"

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
                self._findings.spent += Spent(phases={WAITING: meter.waited_seconds})
                why = self._observer.ended_from_outside(error)
                if not why:
                    raise
                raise CaseFailedError(f"{why}, while it waited for hardware that others hold") from None
            yield gpus

    def _waits(self, what: str) -> None:
        """Others hold ``what``: no longer than there is time for anything."""
        self.while_waiting()
        if time.monotonic() >= self._run.until:
            raise RunEndedError(
                f"its time was over while it waited for {what}, which another launch here holds", UNFINISHED
            )


class _Watched:
    """One launch while it runs."""

    def __init__(self, live: LaunchObserver, meter: Meter, tell: Callable[[], None]) -> None:
        self._live, self._meter, self._tell = live, meter, tell
        self._outcome: Launch | Failure | None = None
        self.last = Progress(phase="starting")
        self.broken_off: Failure | None = None
        """Why somebody else ended it, a test's time limit say."""

    def watch(self, progress: Progress) -> None:
        """The launch has come so far."""
        self.last = progress
        self._live.update(progress)
        self._tell()

    def ended(self, outcome: Launch | Failure) -> Launch | Failure:
        """``outcome``, with the wait for hardware among a record's phases."""
        if isinstance(outcome, Launch) and outcome.phases:
            waited = round(self._meter.waited_seconds, 3)
            outcome = replace(outcome, phases={WAITING: waited, **outcome.phases})
        self._outcome = outcome
        return outcome

    def phases(self, remainder: str) -> Mapping[str, float]:
        """Where its seconds went; those that no record tells of are called ``remainder``."""
        record: Mapping[str, float] = {}
        if isinstance(self._outcome, Launch):
            record = self._outcome.phases
            remainder = remainder if record else OTHER
        return accounted(record, self._meter.waited_seconds, self._meter.seconds, remainder)


def _file_name(name: str) -> str:
    """``name``, or as much of it as a file system takes, and a hash that keeps two long ones apart."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
