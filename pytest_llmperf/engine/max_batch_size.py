"""``perf.max_micro_batch``: the largest micro-batch of a spec, held against its baseline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from pytest_llmperf.engine.baseline_comparison import contradictions
from pytest_llmperf.engine.batch_size_finder import Fitted, fit, short
from pytest_llmperf.engine.launch_retry import LaunchRetry
from pytest_llmperf.engine.recorder import Recorder
from pytest_llmperf.engine.runner import Runner
from pytest_llmperf.engine.search_deadline import SearchDeadline, bounds
from pytest_llmperf.judge import validity
from pytest_llmperf.judge.batch_size_baseline import CapacityBaseline, judge_capacity
from pytest_llmperf.launch.memory_estimate import PredictionError, predict
from pytest_llmperf.records.batch_size_search import LARGEST, Search
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Check, joined_reasons
from pytest_llmperf.run.context import Context
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support.formats import memory

#: Launches that an answer takes where the prediction was good: one that tries sizes, and two that confirm. An answer
#: that is known, and still right, takes the last two.
LAUNCHES = 3

# Sizes whose predicted peaks give the line to begin with; larger than where the optimizer's step is the peak.
_SIZES = (16, 32)


class _SpoiltError(Exception):
    """A launch and its retry were spoilt: whatever fits beside a neighbour is no answer, and the search ends."""


class MaxBatchSize:
    """Finds and judges the largest micro-batch of one test's specs."""

    def __init__(self, context: Context, runner: Runner, recorder: Recorder, say: Callable[[str], None]) -> None:
        self._context, self._runner, self._recorder, self._say = context, runner, recorder, say

    def check(self, spec: TrainSpec, result: CaseResult, inactive: frozenset[str]) -> tuple[CaseResult, str, str]:
        """``result`` with what was found, what that is held against, and why it was not recorded where it should be.

        Raises:
            BaselineError: there is a file that cannot serve, or none can be written; before anything is launched.
            LaunchFailed: a launch ended for another reason than a lack of memory.
        """
        baseline = self._recorder.load_capacity(spec)
        self._recorder.prepare(spec, baseline)
        found, refused = self._measured(spec, result, inactive, 0 if baseline is None else baseline.size), ""
        if found.verdict != "invalid":
            record = partial(self._recorder.record_capacity, spec)
            found, baseline, refused = self._recorder.settle(baseline, partial(_judged, found), record)
        return found, "none" if baseline is None else f"{baseline.size} sequences", refused

    def _measured(self, spec: TrainSpec, result: CaseResult, inactive: frozenset[str], known: int) -> CaseResult:
        """``result`` with what was found, and no verdict, unless it is invalid."""
        # Clocks and drift say nothing of what fits.
        sound = LaunchRetry(lambda launch: validity.neighbours(launch.health), self._say)
        try:
            found = self._find(spec, sound, known)
        except _SpoiltError:
            return replace(result, verdict="invalid", reason=joined_reasons(sound.spoilt))
        result = replace(result, notes=(*result.notes, *sound.notes))
        if found.given_up:
            reason = _given_up(found, self._context.settings.timeout_seconds)
            return replace(result, verdict="invalid", reason=reason)
        return _told(result, spec, found, inactive)

    def _find(self, spec: TrainSpec, sound: LaunchRetry, known: int) -> Fitted:
        # A CPU's resident memory does not come back, so its peaks are no line.
        limit = 0 if self._context.on_cpu else self._context.memory_bytes
        search = Search(known or (_guess(spec, limit) if limit else spec.micro_batch_size), limit)
        alone = spec.gpus == 1 and self._context.cluster is None  # several ranks would have to agree on each size
        with self._runner.hold(spec.gpus):
            deadline = SearchDeadline(
                spec.capacity_id, self._context.settings.timeout_seconds, self._say, lambda: self._runner.seconds
            )
            try_sizes = partial(self._runner.sizes, deadline=deadline) if alone else None
            return fit(spec, search, try_sizes, partial(self._launch, sound), deadline, known=known > 0)

    def _launch(self, sound: LaunchRetry, spec: TrainSpec, number: int) -> Launch:
        try:
            return sound.launch(spec, partial(self._runner.launch, number=number))
        finally:
            if sound.spoilt:
                raise _SpoiltError


def _given_up(found: Fitted, seconds: float) -> str:
    return (
        f"no answer within {seconds:g} s, which --perf-timeout allows the whole search: "
        f"{bounds(found.size, found.fails)} (allow more time, or let fewer sequences fit, by a larger sequence_length "
        "or a lower --perf-memory-limit)"
    )


def _told(result: CaseResult, spec: TrainSpec, found: Fitted, inactive: frozenset[str]) -> CaseResult:
    if found.launch is None:
        reason = "not even a micro-batch of 1 trains: it ran out of memory"
        return replace(result, verdict="invalid", reason=reason)
    if found.size >= LARGEST:
        return replace(result, verdict="invalid", reason=f"no limit was found up to a micro-batch of {LARGEST}")
    troubles = contradictions(short(spec, found.size), (found.launch,), inactive)
    peak = found.launch.peak_reserved_bytes
    note = f"{found.size} sequences fit ({memory(peak)} reserved), {found.size + 1} run out of memory"
    return replace(
        result,
        verdict="invalid" if troubles else "",
        reason=joined_reasons(troubles),
        checks=(
            Check(metric="max_micro_batch_size", value=found.size, unit="1"),
            Check(metric="peak_reserved_bytes", value=peak, unit="bytes"),
            Check(metric="peak_allocated_bytes", value=found.launch.peak_allocated_bytes, unit="bytes"),
        ),
        launches=(found.launch,),
        notes=(*result.notes, note, *(f"measured under {fault}" for fault in validity.injected([found.launch]))),
    )


def _judged(found: CaseResult, baseline: CapacityBaseline | None) -> CaseResult:
    check = judge_capacity(int(found.checks[0].value), baseline)
    reason = f"{check.metric} {check.value:.0f}" + ("" if baseline is None else f", baseline {baseline.size}")
    return replace(found, verdict=check.verdict or "", reason=reason, checks=(check, *found.checks[1:]))


def _guess(spec: TrainSpec, limit_bytes: int) -> int:
    """Where predicted memory meets the limit; the spec's own size where it cannot be predicted."""
    try:
        with ThreadPoolExecutor(len(_SIZES)) as pool:
            specs = [replace(spec, micro_batch_size=size) for size in _SIZES]
            small, large = (sum(parts.values()) for parts in pool.map(predict, specs))
    except PredictionError:
        return spec.micro_batch_size
    each = (large - small) / (_SIZES[1] - _SIZES[0])
    return max(1, int(_SIZES[0] + (limit_bytes - small) / each)) if each > 0 else spec.micro_batch_size
