"""The statistics of launches, on the logarithm of their median step time, where +5 % and -5 % weigh the same.

The unit of evidence is a launch: its steps share hardware, allocator and clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pytest_llmperf.judge.gpu_knowledge import Knowledge
from pytest_llmperf.judge.noise import Noise, Spread, Squares, log_of, sum_of_squares, variance_of, without_outliers
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEAN_UP_TO, centre
from pytest_llmperf.records.result import Verdict
from pytest_llmperf.support.interpreter import np, special

# Keeps a covariance invertible where nothing was ever seen to vary: a millionth of a per cent, squared.
_NEXT_TO_NOTHING = 1e-16
# What that costs in precision: the variance of a median over that of a mean, at most.
_MEDIAN_VARIANCE = math.pi / 2


@dataclass(frozen=True)
class Difference:
    """How much slower a measurement is than its baseline: ``log`` of the ratio of step times, and its error."""

    log: float
    error: float
    df: float
    launch_sd: float
    """Standard deviation of one more launch, or pair."""
    each: tuple[float, ...]
    """The same ``log`` of every launch, or pair, by itself."""
    of_gpus: float = 0.0
    """By how much slower the GPUs of the one are than those of the other, as others tell: no part of ``log``."""
    gpu_df: float = math.inf
    """By how many degrees of freedom it is known what a GPU may do of which nothing tells by itself; infinite where
    something tells of all of them."""


def difference(candidates: Sequence[Launch], baseline: Sequence[Launch], effects: Noise | Knowledge) -> Difference:
    """``candidates`` against what ``baseline`` expects of them where they ran.

    The expectation is the best linear unbiased prediction of a mixed model with an unknown mean (Henderson 1975; in
    geostatistics, ordinary kriging): launches that share most weigh most. What is known of the GPUs of both is taken
    off first, and what is not known of it is a part of the error; where nothing is known of any GPU, these are nested
    deviations of hosts, sites and sessions. Degrees of freedom are Satterthwaite's (1946).
    """
    baseline = without_outliers(baseline, effects.usual(candidates))
    everyone, num = [*baseline, *candidates], len(baseline)
    found = effects.scatter(candidates, baseline)
    # A launch that ended before its median was known scatters by so much more.
    excess = [max(0.0, launch.median_error**2 - found.launch.sd**2) for launch in everyone]
    unsure = np.sqrt(excess)
    own = found.launch.sd**2 * np.eye(len(everyone)) + np.outer(unsure, unsure) * found.lasting
    parts = [*found.shared, (own, found.launch.df)]
    logs = np.array([log_of(launch) for launch in everyone])
    told = _contrasted(logs - found.shifts, num, parts, found.launch)
    return replace(
        told,
        launch_sd=math.sqrt(found.launch.sd**2 + fmean(excess[num:])),
        of_gpus=_contrasted(logs, num, parts, found.launch).log - told.log if found.shifts.any() else 0.0,
        gpu_df=found.gpu_df,
    )


def _contrasted(logs: Any, num: int, parts: Sequence[tuple[Any, float]], launch: Spread) -> Difference:
    """The ``logs`` after the first ``num`` against what these expect of them.

    ``parts``: covariances (arrays) of all of them that add up, and by how many degrees of freedom each is known;
    ``launch``: what one more is off by itself.
    """
    covariance: Any = sum(matrix for matrix, _ in parts)
    inverse = np.linalg.inv(covariance[:num, :num] + _NEXT_TO_NOTHING * np.eye(num))
    ones, towards = np.ones(num), covariance[:num, num:].mean(axis=1)
    unbiased = (1 - ones @ inverse @ towards) / (ones @ inverse @ ones)
    weights = inverse @ (towards + unbiased * ones)
    candidates = [float(log) for log in logs[num:]]
    expected = float(weights @ logs[:num])
    contrast = np.concatenate([-weights, np.full(len(candidates), 1 / len(candidates))])
    shares = [(float(contrast @ matrix @ contrast), df) for matrix, df in parts]
    if len(candidates) > MEAN_UP_TO:
        shares.append(((_MEDIAN_VARIANCE - 1) * launch.sd**2 / len(candidates), launch.df))
    variance, df = variance_of(shares)
    each = tuple(log - expected for log in candidates)
    return Difference(centre(candidates) - expected, math.sqrt(variance), df, launch.sd, each)


def paired_difference(pairs: Sequence[tuple[Launch, Launch]], noise: Noise) -> Difference:
    """The second of each pair against the first. What they share (hardware, day, neighbours) takes itself out."""
    logs = [log_of(after) - log_of(before) for before, after in pairs]
    # Before it was seen, a difference of two launches scatters by the square root of two more than one does.
    prior = Spread(noise.launch.sd * math.sqrt(2), noise.launch.df)
    spread = prior.moderated(Squares(sum_of_squares(logs), len(logs) - 1))
    # A pair whose medians are not known to that scatters by so much more.
    excess = fmean(max(0.0, a.median_error**2 + b.median_error**2 - spread.sd**2) for a, b in pairs)
    sd = math.sqrt(spread.sd**2 + excess)
    return Difference(fmean(logs), sd / math.sqrt(len(logs)), spread.df, sd, tuple(logs))


def quantile(probability: float, df: float) -> float:
    """Of Student's t: the value that it exceeds with ``1 - probability``."""
    return float(special.stdtrit(min(df, 1e6), probability))


# The decision on speed after some launches: a verdict, or that another launch is worth its cost.

#: So many launches, or pairs, have to show an alarm, or praise, each by itself: one that went wrong must not do
#: (decision 9).
CONFIRMED_BY = 2

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
    tailed = replace(difference, df=min(difference.df, difference.gpu_df))
    is_known = math.isinf(difference.gpu_df)
    return not is_known and decide(tailed, tolerance, Rule(budget=rule.budget)).verdict != "regressed"


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
        if sum(sign * each > limit for each in difference.each) >= min(CONFIRMED_BY, budget):
            verdict = "regressed" if difference.log > 0 else "improved"
        elif not ahead.left:
            verdict = "inconclusive"
    elif not_slower and (difference.log > -limit or not another):
        verdict = "pass"
    elif not another:
        verdict = "inconclusive"
    return Decision(verdict=verdict, alarm_log=alarm, detectable=detectable)
