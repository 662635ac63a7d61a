"""Union of static figures: those of two branches as one. Exact, so what both changed can be neither's. Pure."""

from __future__ import annotations

from dataclasses import replace

from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.static.stored_step import StepBaseline, StoredStep

_WHAT_TO_DO = (
    "take one side (git checkout --ours or --theirs) and record the case anew with "
    '--perf-static --update-baselines --perf-reason "why" where both changes are in'
)


def united_step(
    case: str, base: StoredStep | None, ours: StoredStep | None, theirs: StoredStep | None
) -> StoredStep | None:
    """The side that changed the step; of one step the newest acceptance.

    Raises:
        BaselineError: both sides took another step, and not the same one.
    """
    if ours is None or theirs is None:
        return ours or theirs
    if ours.step == theirs.step:
        return max(ours, theirs, key=lambda one: one.recorded_at)
    for side, other in ((ours, theirs), (theirs, ours)):
        if base is not None and side.step == base.step:
            return other
    raise BaselineError(f"{case}: ours and theirs accepted another step each; {_WHAT_TO_DO}")


def united_steps(base: StepBaseline | None, ours: StepBaseline, theirs: StepBaseline) -> StepBaseline:
    """The same of the files of a case that nobody has launched.

    Raises:
        BaselineError: as ``united_step``, or they are of different settings.
    """
    if ours.digest != theirs.digest:
        raise BaselineError(f"{ours.id}: ours is of digest {ours.digest}, theirs of {theirs.digest}; {_WHAT_TO_DO}")
    static = united_step(ours.id, base.static if base else None, ours.static, theirs.static)
    kept = theirs if static == theirs.static else ours
    return replace(kept, static=static or kept.static)
