"""The decision on speed after some launches: a verdict, or that another launch is worth its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pytest_llmperf.judge.stats import Difference, quantile
from pytest_llmperf.records.result import Verdict

# An alarm, or praise, needs this many launches that are each beyond the tolerance: one that went wrong must not do.
_CONFIRMED = 2

# One-sided confidence in "no slower than the tolerance", and how often a change of the detectable size is seen.
_CONFIDENT, _POWER = 0.95, 0.90

# How often, one-sided, a launch in which nothing changed is no further off.
_UNCHANGED = 0.975

# A factor of twenty thousand either way: who knows less than that knows nothing.
_MOST_TOLD = 10.0

# How far the difference may still move, in standard errors of the launches to come.
_MOVES = 2.0


@dataclass(frozen=True)
class Rule:
    """How strict a run is."""

    alpha: float = 1e-3
    """Probability of an alarm in a case in which nothing changed."""
    budget: int = 4
    """Launches of a case at most."""

    @classmethod
    def allowing(cls, alarms_a_month: float, gates: int, budget: int) -> Rule:
        """At most this many false alarms a month in a nightly run of ``gates`` cases, and never above 1 in 1,000."""
        return cls(alpha=min(1e-3, alarms_a_month / (30 * max(1, gates))), budget=budget)


@dataclass(frozen=True)
class Outlook:
    """What the launches that are left can change; if that decides nothing, they are not spent."""

    left: int
    moves: float
    """How far they move the difference at most."""
    error: float
    """Of the difference, once they are spent."""

    @classmethod
    def of(cls, difference: Difference, rule: Rule) -> Outlook:
        num_launches, sd = len(difference.each), difference.launch_sd
        left = max(0, rule.budget - num_launches)
        gain = 1 / num_launches - 1 / (num_launches + left)
        return cls(left, _MOVES * sd * math.sqrt(gain), math.sqrt(max(0.0, difference.error**2 - sd**2 * gain)))


@dataclass(frozen=True)
class Decision:
    """What the launches so far say."""

    verdict: Verdict | None
    """``None``: not decided, and another launch is worth its cost."""
    alarm_log: float
    """The difference from which on this gate calls out, in logarithms."""
    detectable: float
    """The smallest slow-down that this gate sees nine times in ten, within its budget; a fraction."""


def passes_below(difference: Difference, tolerance: float) -> float:
    """The logarithm below which a difference with this error is shown to be within ``tolerance``."""
    return math.log1p(tolerance) - quantile(_CONFIDENT, difference.df) * difference.error


def interval(difference: Difference) -> tuple[float, float]:
    """Between which logarithms the difference is nine times in ten: below the upper end, as a pass is shown, and above
    the lower one, each nineteen times in twenty."""
    reach = min(quantile(_CONFIDENT, difference.df) * difference.error, _MOST_TOLD)
    return difference.log - reach, difference.log + reach


def least_tolerance(difference: Difference) -> float:
    """The tolerance within which a launch in which nothing changed is shown to be, 39 times in 40."""
    return math.expm1((quantile(_CONFIDENT, difference.df) + quantile(_UNCHANGED, difference.df)) * difference.error)


def may_be_its_gpu(difference: Difference, tolerance: float, rule: Rule) -> bool:
    """Whether a loss may be that of a bad GPU, of which nothing tells yet, and not the case's.

    Known GPUs, however many, tell little of a bad one: its effect has the tails that effects have before any is seen.
    It is one draw for all cases of a night: their number makes it no likelier.
    """
    if math.isinf(difference.gpu_df):
        return False
    difference = replace(difference, df=min(difference.df, difference.gpu_df))
    return decide(difference, tolerance, Rule(budget=rule.budget)).verdict != "regressed"


def decide(difference: Difference, tolerance: float, rule: Rule) -> Decision:
    """Whether the launches, or pairs, of ``difference`` decide.

    ``regressed`` (``improved``) where the difference is beyond both the tolerance and the noise, and two launches are
    beyond the tolerance by themselves; ``pass`` where it is shown to be within the tolerance (Schuirmann 1987, one
    side); else another launch, unless none could decide.
    """
    limit, budget = math.log1p(tolerance), max(rule.budget, len(difference.each))
    beyond = quantile(1 - rule.alpha / budget, difference.df)
    alarm = max(limit, beyond * difference.error)
    confident = quantile(_CONFIDENT, difference.df)
    ahead = Outlook.of(difference, rule)
    detectable = math.expm1(max(limit, beyond * ahead.error) + quantile(_POWER, difference.df) * ahead.error)
    not_slower = difference.log < passes_below(difference, tolerance)

    may_pass = difference.log - ahead.moves + confident * ahead.error < limit
    may_alarm = abs(difference.log) + ahead.moves > max(limit, beyond * ahead.error)
    another = ahead.left > 0 and (may_pass or may_alarm)

    verdict: Verdict | None = None
    if abs(difference.log) > alarm:
        sign = math.copysign(1, difference.log)
        if sum(sign * each > limit for each in difference.each) >= min(_CONFIRMED, budget):
            verdict = "regressed" if difference.log > 0 else "improved"
        elif not ahead.left:
            verdict = "inconclusive"
    elif not_slower and (difference.log > -limit or not another):
        verdict = "pass"
    elif not another:
        verdict = "inconclusive"
    return Decision(verdict=verdict, alarm_log=alarm, detectable=detectable)
