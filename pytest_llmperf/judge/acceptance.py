"""Acceptance: what launches become part of a baseline, and what only a reason makes acceptable. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import Accepted, BaselineChangedError, BaselineError
from pytest_llmperf.judge.policy import PHASES
from pytest_llmperf.judge.tracing import exact_counts
from pytest_llmperf.judge.tracing.stored_trace import StoredTrace
from pytest_llmperf.judge.validity import injected
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Check
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support.formats import in_sentence

#: More would only slow reading: what a verdict can see is decided by the first dozen.
MAX_LAUNCHES = 24

# Launches of another speed or memory that take the place of those that are stored.
_PROVEN_BY = 2


def accept(
    old: Baseline | None, *, judged: Baseline | None, spec: TrainSpec, result: CaseResult, entry: Accepted
) -> Baseline:
    """The baseline after the launches of ``result``, which was held against ``judged``, were accepted as ``entry``.

    Launches within tolerance join those that are there; ones beyond it replace them, since two speeds are not one
    population. The anchor stays.

    Raises:
        BaselineChangedError: the launches were judged against another baseline than there is by now.
        BaselineError: they are invalid, or, without a reason, worse beyond tolerance or of something that changed.
    """
    launches, checks = result.launches, result.checks
    _refuse_unfit(spec, launches, result.verdict)
    if old != judged:
        raise BaselineChangedError(spec.id, old)
    if not entry.reason:
        _refuse_unexplained(spec, launches, checks)
        _refuse_silent(spec, result.changed)
    new = Baseline(
        id=spec.id,
        digest=spec.digest,
        machine=result.machine,
        spec=spec.to_dict(),
        recorded_by=result.nodeid,
        launches=launches[-MAX_LAUNCHES:],
        anchor=entry,
        history=(entry,),
        trace=StoredTrace.of(launches),
    )
    return new if old is None else _joined(old, new, checks)


def _joined(old: Baseline, new: Baseline, checks: Sequence[Check]) -> Baseline:
    """``old`` with the one acceptance of ``new``."""
    kept = () if _moved(checks) else old.launches
    return replace(
        old,
        spec=new.spec,
        recorded_by=new.recorded_by,
        launches=(*kept, *new.launches)[-MAX_LAUNCHES:],
        history=(*old.history, *new.history),
        # What other launches did says nothing of those that took their place.
        trace=new.trace or (old.trace if kept else None),
    )


def _refuse_unexplained(spec: TrainSpec, launches: Sequence[Launch], checks: Sequence[Check]) -> None:
    """What only a reason makes acceptable."""
    worse = [check for check in checks if _is_beyond(check, worse=True)]
    unproven = [check for check in checks if check.verdict == "inconclusive" and _is_beyond(check, worse=False)]
    recounted = [check for check in checks if check.verdict == "changed"]
    alone = [check for check in checks if check.verdict == "improved" and len(launches) < _PROVEN_BY]
    if worse:
        raise BaselineError(
            f'{spec.id}: worse beyond tolerance ({_figures(worse)}); accept it with --perf-reason "why"'
        )
    if recounted:
        raise BaselineError(
            f"{spec.id}: other counts or names than in the baseline ({_figures(recounted)}); accept it with "
            '--perf-reason "why"'
        )
    if unproven:
        raise BaselineError(
            f"{spec.id}: better beyond tolerance, and not proven ({_figures(unproven)}); let --perf-launches 4 tell, "
            'or accept it with --perf-reason "why"'
        )
    if alone:
        raise BaselineError(
            f"{spec.id}: one launch alone replaces no baseline ({_figures(alone)}); let --perf-launches {_PROVEN_BY} "
            'tell, or accept it with --perf-reason "why"'
        )


_MOST_CHANGES = 3


def _refuse_silent(spec: TrainSpec, changed: Sequence[str]) -> None:
    """What is as fast as before and not the same is accepted by who says why."""
    if changed:
        more = f" and {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
        raise BaselineError(
            f"{spec.id}: changed since the baseline ({', '.join(changed[:_MOST_CHANGES])}{more}); "
            'accept it with --perf-reason "why"'
        )


def _moved(checks: Sequence[Check]) -> list[Check]:
    """The figures that left their tolerance, so that old and new launches are not one population."""
    beyond = [check for check in checks if _is_beyond(check, worse=True) or _is_beyond(check, worse=False)]
    # Memory, stalls, a cold first step and what is before it say nothing of the median, and efficiency half of it is
    # another width's: what the launches know of days and hosts stays.
    others = ("first_step_seconds", "stall_share", "scaling_efficiency", "first_loss", *PHASES, *exact_counts.METRICS)
    return [check for check in beyond if not check.metric.endswith("_bytes") and check.metric not in others]


def _is_beyond(check: Check, *, worse: bool) -> bool:
    """Whether a gating figure left its tolerance in one direction, be it proven or not."""
    # What was decided stands: a figure below a test's own floor is worse, whichever way it moved.
    if check.verdict != "inconclusive" or check.change is None or check.tolerance is None:
        return check.verdict == ("regressed" if worse else "improved")
    loss = 1 / (1 + check.change) - 1 if check.higher_is_better and check.change > -1 else check.change
    return loss > check.tolerance if worse else 1 / (1 + loss) - 1 > check.tolerance


def _refuse_unfit(spec: TrainSpec, launches: Sequence[Launch], verdict: str) -> None:
    if not launches:
        raise BaselineError(f"{spec.id}: no launch was measured, there is nothing to record")
    if verdict == "invalid":
        raise BaselineError(f"{spec.id}: an invalid launch is never recorded")
    refuse_injected(spec.id, launches)


def refuse_injected(name: str, launches: Sequence[Launch]) -> None:
    """A fault that was asked for is nothing to hold a case against.

    Raises:
        BaselineError: ``launches``, of the case ``name``, were measured under one.
    """
    for fault in injected(launches):
        raise BaselineError(f"{name}: measured under {fault}, which is never recorded")


def _figures(checks: Sequence[Check]) -> str:
    """Then and now."""
    return ", ".join(
        f"{check.metric} {'none' if check.baseline is None else in_sentence(check.baseline, check.unit)}"
        f" -> {in_sentence(check.value, check.unit)}"
        for check in checks
    )
