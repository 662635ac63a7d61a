"""Union of loss curves: those of two branches as one. What both accepted anew can be neither's. Pure."""

from __future__ import annotations

from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.curves.curve_baseline import CurveBaseline

_WHAT_TO_DO = (
    "take one side (git checkout --ours or --theirs) and record the case anew with "
    '--perf-loss-curve --update-baselines --perf-reason "why" where both changes are in'
)


def united_curves(base: CurveBaseline | None, ours: CurveBaseline, theirs: CurveBaseline) -> CurveBaseline:
    """The side that changed the curves; of the same ones the newest acceptance.

    Raises:
        BaselineError: both sides accepted others, or they are of different settings.
    """
    if ours.digest != theirs.digest:
        raise BaselineError(f"{ours.id}: ours is of digest {ours.digest}, theirs of {theirs.digest}; {_WHAT_TO_DO}")
    if ours.curves == theirs.curves:
        return max(ours, theirs, key=lambda one: one.recorded_at)
    for side, other in ((ours, theirs), (theirs, ours)):
        if base is not None and side.curves == base.curves:
            return other
    raise BaselineError(f"{ours.id}: ours and theirs accepted other loss curves each; {_WHAT_TO_DO}")
