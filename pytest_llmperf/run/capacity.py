"""``perf.max_micro_batch``: the largest micro-batch of a spec that fresh launches train, held against its baseline; and
whether what was declared to run out of memory does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.acceptance import judge_fitted
from pytest_llmperf.judge.baseline import CapacityBaseline
from pytest_llmperf.launch.prediction import fitting_batch
from pytest_llmperf.records.failure import SEARCHING, LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, joined_reasons
from pytest_llmperf.run.case import Caller, Case
from pytest_llmperf.run.conclusion import Recorder
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.run.runner import LaunchRetry, Runner
from pytest_llmperf.settings.spec import Spec

#: Launches that an answer takes where the prediction was good; one that is known, and still right, takes two.
LAUNCHES = 3

# The third step is the first with nothing new: kernels are compiled, the optimizer has its states.
_STEPS = 3


@dataclass(frozen=True)
class Fitted:
    """The largest micro-batch that a launch trained, where one with a sequence more ran out of memory."""

    size: int
    """0: not even one sequence fits."""
    launch: Launch | None
    fails: int | None = None
    """The smallest size seen not to train."""
    given_up: bool = False
    """Whether time was over before the answer was known: ``size`` is what was seen to fit by then."""

    @property
    def bounds(self) -> str:
        more = "more were not tried" if self.fails is None else f"{self.fails} do not"
        return f"{self.size} sequences fit, {more}"


def short(spec: Spec, size: int) -> Spec:
    """``spec`` at this micro-batch size, for as many steps as tell whether it fits."""
    least = {} if spec.is_script else {"min_steps": _STEPS}
    return spec.changed(micro_batch_size=size, steps=_STEPS, warmup_steps=1, **least)


def fit(spec: Spec, search: Search, launch: Callable[[Spec, int], Launch], goes_on: Callable[[Fitted], bool]) -> Fitted:
    """Search from where ``search`` begins, as long as it ``goes_on``; each size is a fresh process's. A rank that died
    without a word gets a second chance: memory may have been what ended it."""
    launches, numbers = dict[int, Launch | None](), count(1)
    while (size := search.next()) is not None and size not in launches:
        so_far = Fitted(search.fits, launches.get(search.fits), search.fails)
        if not goes_on(so_far):
            return replace(so_far, launch=None, given_up=True)
        for may_be_killed in (True, False):
            try:
                launches[size] = launch(short(spec, size), next(numbers))
                break
            except LaunchFailed as error:
                launches[size] = None
                if error.failure.kind == "oom":
                    break
                if error.failure.kind != "killed" or not may_be_killed:
                    raise
        trained = launches[size]
        search.note(size, None if trained is None else trained.peak_allocated_bytes)
    return Fitted(search.fits, launches.get(search.fits), search.fails)


class _SpoiltError(Exception):
    """A launch and its retry were spoilt: whatever fits beside a neighbour is no answer, and the search ends."""


class MaxBatchSize:
    """Finds, judges and records the largest micro-batch of one caller's specs."""

    def __init__(self, caller: Caller, runner: Runner, recorder: Recorder) -> None:
        self._caller, self._runner, self._recorder = caller, runner, recorder

    def check(self, case: Case, spec: Spec) -> Concluded:
        run = self._caller.run
        baseline = run.store.capacities.load(run.machine_kind, spec)
        self._recorder.prepare(spec, baseline)
        # Clocks and drift say nothing of what fits.
        retry, found = LaunchRetry(self._runner, self._caller.observer.say), None
        try:
            found = self._find(spec, retry, 0 if baseline is None else baseline.size)
            why_none = _why_none(found, run.settings.timeout_seconds)
        except _SpoiltError:
            why_none = joined_reasons(retry.spoilt)

        def judge(baseline: CapacityBaseline | None) -> CaseResult:
            result = self._caller.result(case, "invalid", why_none)
            if found is not None and found.launch is not None and not why_none:
                result = self._judged(case, found.size, found.launch, baseline)
            return replace(result, notes=(*(retry.notes if found else ()), *result.notes))

        record = partial(self._recorder.record_capacity, spec)
        result, baseline, refused = self._recorder.recorded(judge(baseline), baseline, judge, record)
        held_against = f"{baseline.size} sequences" if baseline else "none"
        return Concluded(result=result, held_against=held_against, refused=refused)

    def _find(self, spec: Spec, retry: LaunchRetry, known: int) -> Fitted:
        run = self._caller.run
        # A CPU's resident memory does not come back, so its peaks are no line.
        limit = 0 if run.on_cpu else run.memory_bytes
        guess, began = known or spec.micro_batch_size, time.monotonic()
        if limit and not known and not spec.is_script:
            guess = fitting_batch(spec, limit)
            self._caller.findings.spend(phases={SEARCHING: time.monotonic() - began})
        search = Search(guess, limit)
        # By the seconds in which something ran; a tiny model in much memory has thousands of sequences.
        end = self._runner.seconds + run.settings.timeout_seconds
        with self._runner.hold(spec.gpus):
            return fit(spec, search, partial(self._launch, retry), lambda _: self._runner.seconds < end)

    def _launch(self, retry: LaunchRetry, spec: Spec, number: int) -> Launch:
        try:
            return retry.launch(spec, number, lambda launch: validity.Circumstances(validity.neighbours(launch.health)))
        finally:
            if retry.spoilt:
                raise _SpoiltError

    def _judged(self, case: Case, size: int, launch: Launch, baseline: CapacityBaseline | None) -> CaseResult:
        troubles = validity.all_troubles(short(case.specs[0], size), (launch,), self._caller.terms.inactive)
        judgement, note = judge_fitted(launch, size, baseline, troubles)
        return replace(
            self._caller.result(case, judgement.verdict, judgement.reason, judgement.checks),
            launches=(launch,),
            notes=(note, *(f"measured under {fault}" for fault in validity.injected([launch]))),
        )


def _why_none(found: Fitted, seconds: float) -> str:
    """Why what was ``found`` is no answer; empty where it is one."""
    if found.given_up:
        return (
            f"no answer within {seconds:g} s, which --perf-timeout allows the whole search: "
            f"{found.bounds} (allow more time, or let fewer sequences fit, by a larger "
            "sequence_length or a lower --perf-memory-limit)"
        )
    if found.launch is None:
        return "not even a micro-batch of 1 trains: it ran out of memory"
    return f"no limit was found up to a micro-batch of {LARGEST}" if found.size >= LARGEST else ""


def runs_out(caller: Caller, runner: Runner, spec: Spec) -> CaseResult:
    """``pass`` where a launch of ``spec`` runs out of memory that nobody else holds; ``invalid`` where it trains."""
    case, retry = Case.of(spec), LaunchRetry(runner, caller.observer.say)
    try:
        launch = retry.launch(spec, 1, lambda _: validity.Circumstances())
    except LaunchFailed as error:
        if error.failure.kind != "oom" or retry.spoilt:
            raise
        return caller.result(case, "pass", "ran out of memory, as declared")
    reason = f"was declared to run out of memory below {caller.terms.oom_below_gib:g} GiB, and trained"
    return replace(caller.result(case, "invalid", reason), launches=(launch,))


# Which size to try next. Pure.

# No card of today holds a batch near this; a search that passes it has been told of no limit.
LARGEST = 2**20

# Beyond a guess that was too small by more than one the first step is this part of it, and each further one four times
# the last: what a guess is off by grows with it, and a launch for every few sequences is too dear.
_STRIDE, _GROWTH = 64, 4

# Peaks that tell where to look have told it by then; those that mislead may cost no more than every other try.
_TRUSTED = 3


@dataclass
class Search:
    """Finds the largest size that fits, to the unit. It begins at ``guess``, asks for one more, and strides away until
    one size fits and a larger one does not. Then it closes in between: in the middle, or, once peaks are known, where a
    straight line through them meets ``limit_bytes``, since what a step keeps grows evenly with its batch."""

    guess: int = 1
    limit_bytes: int = 0
    peaks: dict[int, int] = field(default_factory=dict)
    """Peak bytes of each size that fitted."""
    too_large: set[int] = field(default_factory=set)
    closing: int = 0
    """Sizes that were tried between one that fits and one that does not."""

    @property
    def fits(self) -> int:
        """The largest size seen to fit; 0 where none was."""
        return max(self.peaks, default=0)

    @property
    def fails(self) -> int | None:
        return min(self.too_large, default=None)

    def note(self, size: int, peak_bytes: int | None) -> None:
        """That ``size`` fitted with this peak, or did not (``None``). What contradicts it is forgotten."""
        self.closing += bool(self.peaks and self.too_large)
        if peak_bytes is None:
            self.too_large.add(size)
            self.peaks = {known: peak for known, peak in self.peaks.items() if known < size}
        else:
            self.peaks[size] = peak_bytes
            self.too_large = {known for known in self.too_large if known > size}

    def next(self) -> int | None:
        """The size to try; ``None`` where the answer is known."""
        if self.fits + 1 == self.fails or self.fits >= LARGEST:
            return None
        if not self.peaks:
            if self.fails is None:
                return self.guess
            # The size after the smallest that does not fit says no more than it.
            is_first = len(self.too_large - {self.fails + 1}) == 1
            return max(1, self.fails - 1 - self.fails // _STRIDE if is_first else self.fails // 2)
        high = self.fails
        return self._beyond(self.fits) if high is None else self._between(self.fits, high)

    def _beyond(self, low: int) -> int:
        """Where nothing was too large yet."""
        below, expected = max((size for size in self.peaks if size < low), default=low), self._expected()
        if low in {self.guess, below}:
            further = low + 1
        elif expected is not None and expected >= low:
            # A line is not believed further than twice as far; and lines that each let one more in, not for long.
            further = max(min(expected + 1, 2 * low), low + 2 ** (len(self.peaks) - 1) // 2**_TRUSTED)
        elif expected is not None:
            # The line ends below: it is off by little, and what is beyond it is looked for in small steps first.
            further = low + 2 ** (len(self.peaks) - 1)
        else:
            further = low + max(_GROWTH * (low - below), low // _STRIDE)
        return min(max(further, low + 1), LARGEST)

    def _between(self, low: int, high: int) -> int:
        """Where the answer lies: ``low`` fits, ``high`` does not."""
        middle, expected = (low + high) // 2, self._expected()
        if expected is None or (self.closing >= _TRUSTED and self.closing % 2):
            return middle
        if low < expected < high:
            return expected
        # Where the line ends at what fits, one more is what is left to ask; where beyond what does not, it is off.
        return low + 1 if expected <= low else middle

    def _expected(self) -> int | None:
        """The largest size that a line through the two largest that fitted lets in; of one alone, through nothing."""
        if not self.limit_bytes:
            return None
        b, a = [*sorted(self.peaks, reverse=True), 0][:2]
        slope = (self.peaks[b] - self.peaks.get(a, 0)) / (b - a)
        return b + int((self.limit_bytes - self.peaks[b]) // slope) if slope > 0 else None
