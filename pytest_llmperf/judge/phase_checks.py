"""Phase checks: how long a launch took before and beside its steps, held against the baseline's launches. Pure.

Start, imports, the model, a checkpoint: each twice as long and some seconds more is a loss, never by one launch
(decision 31). Only like is compared with like: a warm launch imports nothing, and what its start takes is what
was left of a fork server's imports; a cold one reads a model family's code while it builds the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.verdict import CONFIRMED_BY, OF_ONE_LAUNCH, Judgement, Reference, horizon, lasting, limit
from pytest_llmperf.records.allocated_growth import MOST_GROWTH
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, Metric, phases
from pytest_llmperf.records.phases import CHECKPOINT
from pytest_llmperf.records.result import Check, Verdict


@dataclass(frozen=True)
class PhaseChecks:
    """What was found."""

    checks: tuple[Check, ...] = ()
    """One for each phase that the launches tell of; without a verdict where nothing like it is stored."""
    undecided: bool = False
    """Whether another launch is worth its cost."""
    notes: tuple[str, ...] = ()
    """What one launch alone had too much of."""


def phase_checks(launches: Sequence[Launch], held: Reference | None, policy: Policy) -> PhaseChecks:
    """The phases of ``launches`` against those of launches that are like them in ``held``."""
    checks, notes, undecided = [], [], False
    for name, metric in phases().items():
        told = [launch for launch in launches if _tells(metric, launch)]
        if not told:
            continue
        check = metric.check(metric.read(told))
        tolerance = policy.tolerances.get(name)
        weighed = [] if tolerance is None or held is None else _weighed(metric, told, held, tolerance)
        if tolerance is None or not weighed:
            checks.append(check)
            continue
        best = min(weighed, key=lambda each: each.seconds / each.limit)
        verdict = _verdict(best, weighed)
        lacks_another = verdict == "inconclusive" and len(launches) < policy.rule.budget
        undecided |= lacks_another
        checks.append(
            metric.check(
                best.seconds,
                baseline=best.usual,
                tolerance=tolerance,
                limit=best.limit,
                change=best.seconds / best.usual - 1 if best.usual else None,
                verdict=verdict,
                detail=OF_ONE_LAUNCH if verdict == "inconclusive" else "",
            )
        )
        worst = max(weighed, key=lambda each: each.seconds / each.limit)
        if verdict == "pass" and worst.is_beyond:
            notes.append(
                f"{name} {worst.seconds:.3g} s in one launch, {best.seconds:.3g} s in another: the shortest counts"
            )
    return PhaseChecks(tuple(checks), undecided, tuple(notes))


@dataclass(frozen=True)
class _Weighed:
    """One launch in one phase, what launches like it usually take, and what they may."""

    seconds: float
    usual: float
    limit: float

    @property
    def is_beyond(self) -> bool:
        return not self.seconds <= self.limit  # also true of NaN


def _weighed(metric: Metric, launches: Sequence[Launch], held: Reference, tolerance: float) -> list[_Weighed]:
    found = []
    for launch in launches:
        sides = (held.stored, held.newest, held.explained)
        stored, newest, explained = ([each for each in side if alike(metric, launch, each)] for side in sides)
        if stored:
            usual = lasting(metric, Reference(stored, newest or stored, explained or stored))
            found.append(_Weighed(metric.read([launch]), usual, limit(metric, usual, tolerance)))
    return found


def _verdict(best: _Weighed, weighed: Sequence[_Weighed]) -> Verdict:
    if not best.is_beyond:
        return "pass"
    return "regressed" if len(weighed) >= CONFIRMED_BY else "inconclusive"


def _tells(metric: Metric, launch: Launch) -> bool:
    # Of a launch that began warm how far a server was with its imports says nothing.
    is_warm = launch.evidence.get("start") == "warm"
    return metric.phase in launch.phases and not (is_warm and metric.only_cold)


def alike(metric: Metric, a: Launch, b: Launch) -> bool:
    """Whether both tell of a phase, and began in one way, which a checkpoint does not know."""
    began_alike = metric.phase == CHECKPOINT or a.evidence.get("start") == b.evidence.get("start")
    return began_alike and _tells(metric, a) and _tells(metric, b)


# Growth check: whether steps leave memory behind, which ends a long training and not a launch. Pure.


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
        METRICS[GROWTH].check(
            value,
            baseline=usual if accepted else None,
            tolerance=_TOLERANCE if is_held else None,
            limit=limit,
            verdict=verdict,
            detail=detail,
        ),
    )


def is_doubted(judgement: Judgement) -> bool:
    """Whether something was seen that a launch of all its steps has to show too."""
    whole = [name for name, metric in METRICS.items() if metric.whole]
    return any(check.verdict == "inconclusive" and check.metric in whole for check in judgement.checks)


def _of(launch: Launch) -> float:
    return launch.allocated_growth or 0.0
