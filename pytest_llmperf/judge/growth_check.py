"""Growth check: whether steps leave memory behind, which ends a long training and not a launch. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmperf.judge.policy import METRICS
from pytest_llmperf.judge.verdict import CONFIRMED_BY, OF_ONE_LAUNCH, Judgement, horizon
from pytest_llmperf.records.allocated_growth import MOST_GROWTH
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Check, Verdict

GROWTH = "allocated_growth_bytes"

# Of a growth that was accepted.
_TOLERANCE = 0.1


def growth_checks(launches: Sequence[Launch], accepted: Sequence[Launch], budget: int) -> tuple[Check, ...]:
    """The check of what ``launches`` leave behind a step; none where nothing counted it.

    More than the limit is a loss also where nothing is stored. ``accepted`` are the baseline's with the last reason.
    """
    told = [launch for launch in launches if launch.allocated_growth is not None]
    if not told:
        return ()
    usual = min((launch.allocated_growth or 0.0 for launch in accepted), default=0.0)
    limit = max(MOST_GROWTH, usual * (1 + _TOLERANCE))
    whole, seen = horizon(told)
    value = min(_of(launch) for launch in whole)
    is_held = bool(accepted) or value > limit  # a new case has figures to show, and no loss
    verdict: Verdict | None = "pass" if is_held and not seen else None
    if value > limit:
        beyond = sum(_of(launch) > limit for launch in told)
        verdict = "regressed" if beyond >= min(CONFIRMED_BY, budget) else "inconclusive"
    detail = seen or (OF_ONE_LAUNCH if verdict == "inconclusive" else "")
    return (
        Check(
            metric=GROWTH,
            value=value,
            unit="bytes",
            baseline=usual if accepted else None,
            tolerance=_TOLERANCE if is_held else None,
            limit=limit,
            verdict=verdict,
            detail=detail,
        ),
    )


def is_doubted(judgement: Judgement) -> bool:
    """Whether something was seen that a launch of all its steps has to show too."""
    of_all_steps = (GROWTH, *(name for name, metric in METRICS.items() if metric.whole))
    return any(check.verdict == "inconclusive" and check.metric in of_all_steps for check in judgement.checks)


def _of(launch: Launch) -> float:
    return launch.allocated_growth or 0.0
