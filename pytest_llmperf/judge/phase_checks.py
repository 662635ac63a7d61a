"""Phase checks: how long a launch took before and beside its steps, held against the baseline's launches. Pure.

Start, imports, the model, a checkpoint: each twice as long and some seconds more is a loss, never by one launch
(decision 31). Only like is compared with like: a warm launch imports nothing, and what its start takes is what
was left of a fork server's imports; a cold one reads a model family's code while it builds the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.stats import CONFIRMED_BY
from pytest_llmperf.judge.verdict import OF_ONE_LAUNCH, Judgement, Reference, horizon, lasting, limit
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, Metric, phases
from pytest_llmperf.records.phases import CHECKPOINT
from pytest_llmperf.records.result import Check, Verdict
from pytest_llmperf.records.steady_state import MOST_GROWTH


@dataclass(frozen=True)
class PhaseChecks:
    """What was found; ``notes``: what one launch alone had too much of."""

    checks: tuple[Check, ...] = ()
    """One for each phase that the launches tell of; without a verdict where nothing like it is stored."""
    undecided: bool = False
    notes: tuple[str, ...] = ()


def phase_checks(launches: Sequence[Launch], held: Reference | None, policy: Policy) -> PhaseChecks:
    """The phases of ``launches`` against those of launches that are like them in ``held``."""
    checks, notes, undecided = [], [], False
    for name, metric in phases().items():
        told = [launch for launch in launches if _tells(metric, launch)]
        if not told:
            continue
        tolerance = policy.tolerances.get(name)
        # Seconds of one launch, what launches like it usually take, and what they may.
        weighed: list[tuple[float, float, float]] = []
        for launch in told if held and tolerance is not None else ():
            sides = (held.stored, held.newest, held.explained) if held else ()
            stored, newest, explained = ([each for each in side if alike(metric, launch, each)] for side in sides)
            if stored:
                usual = lasting(metric, Reference(stored, newest or stored, explained or stored))
                weighed.append((metric.read([launch]), usual, limit(metric, usual, tolerance or 0.0)))
        if not weighed:
            checks.append(metric.check(metric.read(told)))
            continue
        weighed.sort(key=lambda each: each[0] / each[2])
        (seconds, usual, most), worst = weighed[0], weighed[-1]
        verdict: Verdict = "pass"
        if not seconds <= most:  # also true of NaN
            verdict = "regressed" if len(weighed) >= CONFIRMED_BY else "inconclusive"
        undecided |= verdict == "inconclusive" and len(launches) < policy.rule.budget
        checks.append(
            metric.check(
                seconds,
                baseline=usual,
                tolerance=tolerance,
                limit=most,
                change=seconds / usual - 1 if usual else None,
                verdict=verdict,
                detail=OF_ONE_LAUNCH if verdict == "inconclusive" else "",
            )
        )
        if verdict == "pass" and not worst[0] <= worst[2]:
            notes.append(f"{name} {worst[0]:.3g} s in one launch, {seconds:.3g} s in another: the shortest counts")
    return PhaseChecks(tuple(checks), undecided, tuple(notes))


def _tells(metric: Metric, launch: Launch) -> bool:
    # Of a launch that began warm how far a server was with its imports says nothing.
    is_warm = launch.evidence.get("start") == "warm"
    return metric.phase in launch.phases and not (is_warm and metric.only_cold)


def alike(metric: Metric, a: Launch, b: Launch) -> bool:
    """Whether both tell of a phase, and began in one way, which a checkpoint does not know."""
    began_alike = metric.phase == CHECKPOINT or a.evidence.get("start") == b.evidence.get("start")
    return began_alike and _tells(metric, a) and _tells(metric, b)


# Growth check: whether steps leave memory behind, which ends a long training and not a launch.

GROWTH = "allocated_growth_bytes"

# Of a growth that was accepted.
_TOLERANCE = 0.1


def growth_checks(launches: Sequence[Launch], accepted: Sequence[Launch], budget: int) -> tuple[Check, ...]:
    """The check of what ``launches`` leave behind a step; none where nothing counted it.

    More than the limit is a loss also where nothing is stored. ``accepted`` are the baseline's with the last reason.
    """
    growth = [launch.allocated_growth for launch in launches if launch.allocated_growth is not None]
    if not growth:
        return ()
    usual = min((launch.allocated_growth or 0.0 for launch in accepted), default=0.0)
    limit = max(MOST_GROWTH, usual * (1 + _TOLERANCE))
    whole, seen = horizon([launch for launch in launches if launch.allocated_growth is not None])
    value = min(launch.allocated_growth or 0.0 for launch in whole)
    is_held = bool(accepted) or value > limit  # a new case has figures to show, and no loss
    verdict: Verdict | None = "pass" if is_held and not seen else None
    if value > limit:
        is_confirmed = sum(each > limit for each in growth) >= min(CONFIRMED_BY, budget)
        verdict = "regressed" if is_confirmed else "inconclusive"
    check = METRICS[GROWTH].check(
        value,
        baseline=usual if accepted else None,
        tolerance=_TOLERANCE if is_held else None,
        limit=limit,
        verdict=verdict,
        detail=seen or (OF_ONE_LAUNCH if verdict == "inconclusive" else ""),
    )
    return (check,)


def is_doubted(judgement: Judgement) -> bool:
    """Whether something was seen that a launch of all its steps has to show too."""
    whole = [name for name, metric in METRICS.items() if metric.whole]
    return any(check.verdict == "inconclusive" and check.metric in whole for check in judgement.checks)
