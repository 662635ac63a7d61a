"""Policy: what a kind of machine tolerates, when speeds differ, and with which step times a launch passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median_low
from typing import Any, TypeAlias

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.judge.gpu_knowledge import FEWEST_CASES, Knowledge
from pytest_llmperf.judge.gpu_panel import Unit
from pytest_llmperf.judge.stats import Difference, Experience, Noise, Spread, log_of, quantile
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, RATE, Metric, measured, phases
from pytest_llmperf.records.result import Verdict
from pytest_llmperf.records.steady_state import ENOUGH, PassingRange, PassingRanges
from pytest_llmperf.support.user_input import hint, is_positive

#: So many launches, or pairs, have to show an alarm, or praise, by themselves: one may go wrong (decision 9).
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
    """Between which logarithms the difference is nine times in ten: beyond each end one time in twenty."""
    reach = min(quantile(_CONFIDENT, difference.df) * difference.error, _MOST_TOLD)
    return difference.log - reach, difference.log + reach


def least_tolerance(difference: Difference) -> float:
    """The tolerance within which a launch in which nothing changed is shown to be, 39 times in 40."""
    return math.expm1((quantile(_CONFIDENT, difference.df) + quantile(_UNCHANGED, difference.df)) * difference.error)


def may_be_its_gpu(difference: Difference, tolerance: float, rule: Rule) -> bool:
    """Whether a loss may be that of a bad GPU, of which nothing tells yet, and not the case's. Known GPUs, however
    many, tell little of a bad one: its effect has the tails that effects have before any is seen. It is one draw for
    all cases of a night: their number makes it no likelier."""
    tailed = replace(difference, df=min(difference.df, difference.gpu_df))
    is_known = math.isinf(difference.gpu_df)
    return not is_known and decide(tailed, tolerance, Rule(budget=rule.budget)).verdict != "regressed"


def decide(difference: Difference, tolerance: float, rule: Rule) -> Decision:
    """Whether the launches, or pairs, of ``difference`` decide. ``regressed`` (``improved``) where the difference is
    beyond both the tolerance and the noise, and two launches are beyond the tolerance by themselves; ``pass`` where it
    is shown to be within the tolerance (Schuirmann 1987, one side); else another launch, unless none could decide."""
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


_GPU_NOISE = Noise(host=Spread(0.008, 6), site=Spread(0.008, 10), session=Spread(0.004, 6), launch=Spread(0.004, 8))
# Of a quiet one: it matters only to who sets a tolerance of their own, and a busy one soon teaches more.
_CPU_NOISE = Noise(host=Spread(0.10, 8), site=Spread(0.10, 8), session=Spread(0.05, 8), launch=Spread(0.05, 8))


@dataclass(frozen=True)
class Policy:
    """By what a case is judged: tolerances, as fractions, by metric; one without is shown and gates nothing;
    ValueError: an unknown metric (with the nearest known one), or a tolerance that is not a positive fraction."""

    tolerances: Mapping[str, float]
    noise: Noise = _CPU_NOISE
    """The machine's, as its baselines show it; what is believed of it before they do."""
    elsewhere: Mapping[str, float] = field(default_factory=dict)
    """Tolerances in place of those above on hardware that a baseline has not seen; none where a user chose."""
    paired: Mapping[str, float] = field(default_factory=dict)
    """The same, where launches of both sides took turns on the same hardware."""
    rule: Rule = field(default_factory=Rule)
    on_known: Mapping[str, float] = field(default_factory=dict)
    """Those on hardware that is known, where ``tolerances`` are wider as long as the run does not know its own."""
    knowledge: Knowledge | None = None
    """Of the run's GPUs; ``None``: too little is stored, or it is a CPU's run, and each case stands for itself."""
    is_elsewhere: bool = False
    """Whether launches ran on hardware that their baseline does not know."""
    waits: bool = False
    """Whether a loss that may be its GPU's is decided at the run's end, by when other cases have told of that."""
    chosen: frozenset[str] = frozenset()
    """Metrics of which somebody chose the tolerance: nothing narrows it."""

    def __post_init__(self) -> None:
        for metric, tolerance in self.tolerances.items():
            known = (*measured(), *phases())
            if metric not in known:
                near = hint(metric, known) or f"; known: {', '.join(known)}"
                raise ValueError(f"tolerance for unknown metric {metric!r}{near}")
            if not is_positive(tolerance):
                raise ValueError(f"tolerance {metric}={tolerance!r} must be a positive fraction, e.g. 0.05 for 5 %")

    @classmethod
    def for_gpu(cls) -> Policy:
        return cls(_tolerances("gpu"), _GPU_NOISE, _tolerances("gpu_elsewhere"), _tolerances("gpu_paired"))

    @classmethod
    def for_cpu(cls) -> Policy:
        return cls(_tolerances("cpu"), _CPU_NOISE)

    def disagreement(self, launches: Sequence[Launch]) -> str:
        """As ``stats`` tells it, of launches whose rate gates."""
        tolerance = self.tolerances.get(RATE)
        return "" if tolerance is None else stats.disagreement(launches, self.noise, tolerance)

    @property
    def speed_tolerance(self) -> float:
        """Of throughput; without end where that gates nothing."""
        return self.tolerances.get(RATE, math.inf)

    def merged(self, tolerances: Mapping[str, float]) -> Policy:
        elsewhere, paired = (
            {metric: value for metric, value in special.items() if metric not in tolerances}
            for special in (self.elsewhere, self.paired)
        )
        own, chosen = {**self.tolerances, **tolerances}, self.chosen | {*tolerances}
        return replace(self, tolerances=own, elsewhere=elsewhere, paired=paired, chosen=chosen)

    def difference(self, launches: Sequence[Launch], stored: Sequence[Launch]) -> Difference:
        return stats.difference(launches, stored, self.knowledge or self.noise)

    def at(self, launches: Sequence[Launch], baseline: Baseline, difference: Difference | None = None) -> Policy:
        """This policy where ``launches`` ran: on hardware that ``baseline`` knows, or elsewhere. Elsewhere a tolerance
        is no wider than it has to be for one unchanged launch to pass, as far as the run knows its GPU by then;
        ``difference``: theirs from the baseline's, where that is known already."""
        known = {launch.site for launch in baseline.launches}
        if all(launch.site in known for launch in launches):
            return self
        if not self.elsewhere:
            return replace(self, is_elsewhere=True)
        if self.knowledge is None:
            return replace(self, tolerances={**self.tolerances, **self.elsewhere}, is_elsewhere=True)
        least = least_tolerance(difference or self.difference(launches, baseline.launches))
        elsewhere = {name: min(widest, max(self.tolerances[name], least)) for name, widest in self.elsewhere.items()}
        wider = {name: self.tolerances[name] for name, value in elsewhere.items() if value > self.tolerances[name]}
        return replace(self, tolerances={**self.tolerances, **elsewhere}, on_known=wider, is_elsewhere=True)

    def in_pairs(self) -> Policy:
        return replace(self, tolerances={**self.tolerances, **self.paired})


def _tolerances(kind: str) -> dict[str, float]:
    return {name: value for name, row in METRICS.items() if (value := getattr(row, kind)) is not None}


# What one launch alone may show: stalls, a cold first step, what is before the steps.


@dataclass(frozen=True)
class Reference:
    """What a measurement is held against that is no baseline, with the launches that one has."""

    launches: Sequence[Launch]
    newest: Sequence[Launch]
    explained: Sequence[Launch]


Held: TypeAlias = Baseline | Reference


def lasting(metric: Metric, held: Held) -> float:
    """How much of a metric of which more is worse, and that one launch alone may show, a launch usually has."""
    # A loss that was accepted is none any more while it lasts, however many launches are stored from before it.
    return max(middle(metric, held.launches), min(middle(metric, held.explained), middle(metric, held.newest)))


def limit(metric: Metric, reference: float, tolerance: float, *, elsewhere: bool = False) -> float:
    """With how much of it a launch passes; ``elsewhere``: on hardware that its baseline does not know."""
    slack = max(metric.slack, metric.slack_elsewhere if elsewhere else 0.0)
    return max(reference * (1 + tolerance), reference + slack)


def middle(metric: Metric, launches: Sequence[Launch]) -> float:
    return median_low(metric.read([launch]) for launch in launches)


def highest(metric: Metric, baseline: Baseline, policy: Policy) -> float:
    """With how much of ``metric``, which is ``confirmed``, a launch passes."""
    return limit(metric, lasting(metric, baseline), policy.tolerances[metric.name])


class StoredOfKind:
    """What the baselines of one machine kind tell of it, as they were when the first was asked for."""

    def __init__(self, store: BaselineStore, machine: str, *, on_cpu: bool, knows_gpus: bool = True) -> None:
        """``knows_gpus``: whether what they tell of single GPUs is asked for."""
        self._store, self._machine, self._knows_gpus = store, machine, knows_gpus and not on_cpu
        self.usual = Policy.for_cpu() if on_cpu else Policy.for_gpu()
        self._with_seen: tuple[int, Knowledge] | None = None  # once so many launches were judged

    @cached_property
    def baselines(self) -> Sequence[Baseline]:
        return self._store.baselines(self._machine)

    @cached_property
    def launches(self) -> Sequence[Sequence[Launch]]:
        return [baseline.launches for baseline in self.baselines]

    @cached_property
    def experience(self) -> Experience:
        """The noise that all of them show."""
        return Experience.of(self.launches, self.usual.noise)

    @cached_property
    def knowledge(self) -> Knowledge | None:
        """Theirs of the machine's GPUs; ``None``: too little to tell GPUs and cases apart, or nobody asks."""
        return Knowledge.of(self.launches) if self._knows_gpus else None

    def knowledge_beside(self, seen: Sequence[Launch]) -> Knowledge | None:
        """The same with what a run has ``seen`` so far."""
        if self.knowledge is None:
            return None
        if self._with_seen is None or len(seen) != self._with_seen[0]:
            self._with_seen = len(seen), self.knowledge.with_seen(seen)
        return self._with_seen[1]

    def tells_later(self, gates: int) -> bool:
        """Whether so many cases tell of their GPUs what one of them alone does not know yet."""
        return gates > FEWEST_CASES and self.knowledge is not None

    def policy(self, rule: Rule, seen: Sequence[Launch]) -> Policy:
        return replace(self.usual, noise=self.experience.noise, rule=rule, knowledge=self.knowledge_beside(seen))


# Early stop: before a launch, with which step times it will pass its case by itself. More steps of such a launch would
# decide nothing, so it may end (``records/steady_state.py``). One that is near a limit, or beyond it, goes on until its
# median is known; so does every later launch of a case that one did not decide.

# Of the error of the difference that decides: a median known to half of it adds an eighth.
_WEIGHT = 0.5
# Of the tolerance: a launch that drifts by half of it has no one speed (``validity.py``), so this one is not near that.
_DRIFT = 0.2
# Of what passes: in fewer steps one that stalls weighs more, and what the slowest rank lost is not seen by another.
_STALLS = 0.5
# Of the steps until most launches were steady: a chip that has not yet found its power limit shows no drift.
_SETTLED = 1.5
# Enough for a median, and to be its own steady state.
_STEPS = 8
# No host and no device has this name: they have letters.
_UNSEEN = "?"


def passing_ranges(baseline: Baseline, policy: Policy, day: str, *, is_shared: bool = False) -> PassingRanges | None:
    """With which step times one launch on ``day`` (UTC, ISO 8601) passes, on each site of ``baseline`` and elsewhere.
    ``is_shared``: other cases compute with the launch too, and it has to tell them no less than a longer one. ``None``:
    nothing is held that fewer steps leave as it is."""
    gating = [row for name, row in METRICS.items() if name in policy.tolerances]
    speeds = [row.name for row in gating if row.early_stop == "median"]
    if not speeds or not all(row.early_stop for row in gating):
        return None
    most = [highest(row, baseline, policy) for row in gating if row.early_stop == "stalls"]
    stalls = min((_STALLS * each for each in most), default=1.0)
    steps = steps_to_settle([launch.steady.start for launch in baseline.launches])
    most_error = max(ENOUGH, policy.noise.launch.sd) if is_shared else math.inf

    def range_of(launch: Launch) -> PassingRange:
        difference = policy.difference([launch], baseline.launches)
        there = policy.at([launch], baseline, difference)
        tolerance = min(there.tolerances[name] for name in speeds)
        # One that is beyond what it would be held to if its GPU were known is confirmed by another.
        closest = min((there.on_known.get(name, math.inf) for name in speeds), default=math.inf)
        found = passing_range(launch, difference, tolerance, closest)
        return replace(found, error=min(found.error, most_error), stalls=stalls, steps=steps)

    # Of each one of the same site on that day, as if its median were known.
    of_steps = dict.fromkeys(("waiting_seconds", "real_tokens", "allocated_bytes", "step_tokens"), ())
    to_come = []
    for launch in baseline.launches:
        told: dict[str, Any] = {"step_seconds": (launch.median_step_seconds,) * _STEPS, "calibration": None, **of_steps}
        ranks = tuple(replace(rank, **told) for rank in launch.ranks)
        to_come.append(replace(launch, started_at=day, warmup_steps=1, ranks=ranks))
    # GPUs that this run knows by now, whether the baseline does or not.
    known = policy.knowledge.units if policy.knowledge else ()
    units = [unit for unit in known if len(unit.devices) == len(to_come[0].ranks)]
    at_sites = {each.site: each for each in (*(_at(to_come[0], unit) for unit in units), *to_come)}
    return PassingRanges(
        at_sites={site: range_of(launch) for site, launch in at_sites.items()},
        on_hosts={host: range_of(_unseen(launch)) for host, launch in {each.host: each for each in to_come}.items()},
        elsewhere=range_of(_unseen(to_come[0], host=_UNSEEN)),
    )


def steps_to_settle(starts: Sequence[int]) -> int:
    """How many steps a launch needs, where the steady state of others of its case began at ``starts``."""
    return math.ceil(_SETTLED * median_low(starts))


def passing_range(to_come: Launch, difference: Difference, tolerance: float, closest: float = math.inf) -> PassingRange:
    """The same where and when ``to_come`` is, whatever its own step time, and its ``difference``. Beyond ``closest`` it
    needs another launch, also where it is within ``tolerance``."""
    expected = log_of(to_come) - difference.log
    limit = math.log1p(tolerance)
    return PassingRange(
        low=expected - limit,
        high=expected + min(passes_below(difference, tolerance), math.log1p(closest)),
        error=_WEIGHT * difference.error,
        drift=_DRIFT * limit,
    )


def _at(launch: Launch, unit: Unit) -> Launch:
    places = zip(launch.ranks, unit.devices, unit.hosts, strict=True)
    return replace(launch, ranks=tuple(replace(rank, device=gpu, host=host, boot="") for rank, gpu, host in places))


def _unseen(launch: Launch, host: str = "") -> Launch:
    """One of its host, or of ``host``, on GPUs that no launch has had."""
    elsewhere: dict[str, Any] = {"host": host, "boot": ""} if host else {}
    return replace(launch, ranks=tuple(replace(rank, device=_UNSEEN, **elsewhere) for rank in launch.ranks))
