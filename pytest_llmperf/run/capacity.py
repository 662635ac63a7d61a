"""``perf.max_micro_batch``: the largest micro-batch of a spec, held against its baseline.

It is found first in one process, then by fresh launches, whose word counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.acceptance import judge_capacity
from pytest_llmperf.judge.baseline import CapacityBaseline
from pytest_llmperf.judge.validity import Circumstances
from pytest_llmperf.launch.prediction import PredictionError, predictions
from pytest_llmperf.launch.watch import Meter
from pytest_llmperf.records.batch_size_search import LARGEST, Search
from pytest_llmperf.records.failure import SEARCHING, LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.result import CaseResult, Check, Spent, Verdict, joined_reasons
from pytest_llmperf.run.baseline_comparison import contradictions
from pytest_llmperf.run.case import Caller, Case
from pytest_llmperf.run.conclusion import Recorder
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.run.runner import LaunchRetry, Runner
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.formats import memory

# The third step is the first with nothing new: kernels are compiled, the optimizer has its states.
_STEPS = 3

_REMIND_SECONDS = 60.0


@dataclass(frozen=True)
class Fitted:
    """The largest micro-batch that a fresh launch trained, where one with a sequence more ran out of memory."""

    size: int
    """0: not even one sequence fits."""
    launch: Launch | None
    fails: int | None = None
    """The smallest size seen not to train."""
    given_up: bool = False
    """Whether time was over before the answer was known: ``size`` is what was seen to fit by then."""


def short(spec: Spec, size: int) -> Spec:
    """``spec`` at this micro-batch size, for as many steps as tell whether it fits."""
    least = {} if spec.is_script else {"min_steps": _STEPS}
    return spec.changed(micro_batch_size=size, steps=_STEPS, warmup_steps=1, **least)


def fit(
    fresh: FreshLaunches,
    search: Search,
    try_sizes: Callable[[TrainSpec, Search], list[tuple[int, int | None]]] | None,
    deadline: SearchDeadline,
    *,
    known: bool = False,
) -> Fitted:
    """Search from where ``search`` begins; ``try_sizes`` tries several in one process, where that can be done.

    ``known``: that size was the answer before, which two launches confirm. What one process tells is a hint: memory
    that it has used is in other pieces than fresh memory. Once a fresh launch contradicts it, these alone are
    believed: each of its other sizes would have to be contradicted by itself.
    """
    hinted = not known
    if known:  # as if one process had told it
        search.note(search.guess, 0)
        search.note(search.guess + 1, None)
    elif try_sizes is not None:
        _take_hints(fresh, search, try_sizes)
    while (wanted := _wanted(search, fresh.launches)) is not None:
        deadline.told(search)
        if deadline.is_over:
            return Fitted(search.fits, None, search.fails, given_up=True)
        trained = fresh.launch(wanted)
        told_wrong = wanted in (search.too_large if trained is not None else search.peaks.keys())
        search.note(wanted, None if trained is None else trained.peak_allocated_bytes)
        if told_wrong:
            search.keep(fresh.launches)
            if not hinted and try_sizes is not None:
                hinted = True
                _take_hints(fresh, search, try_sizes)
    return Fitted(search.fits, fresh.launches.get(search.fits), search.fails)


class SearchDeadline:
    """Bounds one search for the largest micro-batch: a tiny model in much memory has thousands of sequences to train.

    ``spent`` counts the seconds in which something ran, without the wait for hardware.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        say: Callable[[str], None],
        spent: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self.seconds, self._say, self._spent, self._clock = name, seconds, say, spent, clock
        self._start, self._said = spent(), clock()

    @property
    def is_over(self) -> bool:
        return self._spent() - self._start >= self.seconds

    def told(self, search: Search) -> None:
        """Say once a minute how far ``search`` is."""
        now = self._clock()
        if now - self._said >= _REMIND_SECONDS:
            self._said = now
            limit = f"at most {self.seconds:.0f} s of launches (--perf-timeout)"
            self._say(f"{self._name}: {bounds(search.fits, search.fails)} so far; {limit}")


def bounds(fits: int, fails: int | None) -> str:
    return f"{fits} sequences fit, " + ("more were not tried" if fails is None else f"{fails} do not")


class FreshLaunches:
    """Launches of a spec, a process each, by their size; none where it ran out of memory."""

    def __init__(self, spec: Spec, launch: Callable[[Spec, int], Launch]) -> None:
        self.spec, self._launch, self._number = spec, launch, 0
        self.launches: dict[int, Launch | None] = {}

    def launch(self, size: int) -> Launch | None:
        """A rank that died without a word gets a second chance: memory may have been what ended it."""
        for may_be_killed in (True, False):
            self._number += 1
            try:
                self.launches[size] = self._launch(short(self.spec, size), self._number)
                break
            except LaunchFailed as error:
                self.launches[size] = None
                if error.failure.kind == "oom":
                    break
                if error.failure.kind != "killed" or not may_be_killed:
                    raise
        return self.launches[size]


def _take_hints(
    fresh: FreshLaunches, search: Search, try_sizes: Callable[[TrainSpec, Search], list[tuple[int, int | None]]]
) -> None:
    """Let one process go on from where ``search`` is; what fresh launches have told already stays."""
    begin = search.next() or 1
    trained = max((size for size, launch in fresh.launches.items() if launch is not None), default=0)
    failed = min((size for size, launch in fresh.launches.items() if launch is None), default=LARGEST + 1)
    for size, peak in try_sizes(cast("TrainSpec", short(fresh.spec, begin)), replace(search, guess=begin)):
        if trained < size < failed:
            search.note(size, peak)


def _wanted(search: Search, fresh: dict[int, Launch | None]) -> int | None:
    """``None`` once the answer and the size after it are confirmed."""
    size = search.next()
    if size is None and search.fits < LARGEST:
        # The larger one first: where the hint was too careful, the search goes on from there.
        unconfirmed = [size for size in (search.fails, search.fits) if size and size not in fresh]
        size = next(iter(unconfirmed), None)
    return None if size in fresh else size


#: Launches that an answer takes where the prediction was good: one that tries sizes, and two that confirm. An answer
#: that is known, and still right, takes the last two.
LAUNCHES = 3

# Sizes whose predicted peaks give the line to begin with; larger than where the optimizer's step is the peak.
_SIZES = (16, 32)


class _SpoiltError(Exception):
    """A launch and its retry were spoilt: whatever fits beside a neighbour is no answer, and the search ends."""


class MaxBatchSize:
    """Finds, judges and records the largest micro-batch of one caller's specs."""

    def __init__(self, caller: Caller, runner: Runner, recorder: Recorder) -> None:
        self._caller, self._runner, self._recorder = caller, runner, recorder

    def check(self, case: Case, spec: Spec) -> Concluded:
        baseline = self._recorder.load_capacity(spec)
        self._recorder.prepare(spec, baseline)
        # Clocks and drift say nothing of what fits.
        retry, found = LaunchRetry(self._runner, self._caller.observer.say), None
        try:
            found = self._find(spec, retry, 0 if baseline is None else baseline.size)
            why_none = _why_none(found, self._caller.run.settings.timeout_seconds)
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
        search = Search(known or (self._guess(spec, limit) if limit else spec.micro_batch_size), limit)
        alone = spec.gpus == 1 and run.site.is_here  # several ranks would have to agree on each size
        with self._runner.hold(spec.gpus):
            timeout, say = run.settings.timeout_seconds, self._caller.observer.say
            deadline = SearchDeadline(spec.capacity_id, timeout, say, lambda: self._runner.seconds)
            try_sizes = partial(self._runner.sizes, tell=deadline.told) if alone and not spec.is_script else None
            return fit(FreshLaunches(spec, partial(self._launch, retry)), search, try_sizes, deadline, known=known > 0)

    def _guess(self, spec: Spec, limit_bytes: int) -> int:
        """Where predicted memory meets the limit; the spec's own size where it cannot be predicted."""
        if not isinstance(spec, TrainSpec):
            return spec.micro_batch_size
        meter, sums = Meter(), []
        with meter.running():
            for parts in predictions([replace(spec, micro_batch_size=size) for size in _SIZES]):
                if isinstance(parts, PredictionError):
                    break
                sums.append(sum(parts.values()))
        self._caller.findings.spent += Spent(phases={SEARCHING: meter.seconds})
        if len(sums) < len(_SIZES):
            return spec.micro_batch_size
        each = (sums[1] - sums[0]) / (_SIZES[1] - _SIZES[0])
        return max(1, int(_SIZES[0] + (limit_bytes - sums[0]) / each)) if each > 0 else spec.micro_batch_size

    def _launch(self, retry: LaunchRetry, spec: Spec, number: int) -> Launch:
        try:
            return retry.launch(spec, number, lambda launch: Circumstances(validity.neighbours(launch.health)))
        finally:
            if retry.spoilt:
                raise _SpoiltError

    def _judged(self, case: Case, size: int, launch: Launch, baseline: CapacityBaseline | None) -> CaseResult:
        check, peak = judge_capacity(size, baseline), launch.peak_reserved_bytes
        reason = f"{check.metric} {check.value:.0f}" + ("" if baseline is None else f", baseline {baseline.size}")
        troubles = contradictions(short(case.specs[0], size), (launch,), self._caller.terms.inactive)
        if troubles:
            check = Check(metric=check.metric, value=check.value, unit=check.unit)
        allocated = METRICS["peak_allocated_bytes"].check(launch.peak_allocated_bytes)
        checks = (check, METRICS["peak_reserved_bytes"].check(peak), allocated)
        verdict: Verdict = "invalid" if troubles else check.verdict or "pass"
        note = f"{size} sequences fit ({memory(peak)} reserved), {size + 1} run out of memory"
        return replace(
            self._caller.result(case, verdict, joined_reasons(troubles) or reason, checks),
            launches=(launch,),
            notes=(note, *(f"measured under {fault}" for fault in validity.injected([launch]))),
        )


def _why_none(found: Fitted, seconds: float) -> str:
    """Why what was ``found`` is no answer; empty where it is one."""
    if found.given_up:
        return (
            f"no answer within {seconds:g} s, which --perf-timeout allows the whole search: "
            f"{bounds(found.size, found.fails)} (allow more time, or let fewer sequences fit, by a larger "
            "sequence_length or a lower --perf-memory-limit)"
        )
    if found.launch is None:
        return "not even a micro-batch of 1 trains: it ran out of memory"
    return f"no limit was found up to a micro-batch of {LARGEST}" if found.size >= LARGEST else ""
