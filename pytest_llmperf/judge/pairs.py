"""Pairs: launches of two sides that took turns on the same hardware: what one spec brings over another, and bounds on
that; and on which side of the middle between a good and a bad end of a history others are. Counts are decided by one
pair, speed by a sequential test with a given probability of error over all looks (Bonferroni). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from pytest_llmperf.judge.exact import StoredTrace, changed_evidence, changes, count_checks, count_of, told_changes
from pytest_llmperf.judge.policy import CONFIRMED_BY, Outlook, Policy, Reference, Rule
from pytest_llmperf.judge.repeats import Repeats
from pytest_llmperf.judge.stats import Difference, Pairs, paired_difference, quantile, work_of
from pytest_llmperf.judge.verdict import Judgement, growth_checks, joined, judge_pairs, phase_checks
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, METRICS, RATE, counts, measured
from pytest_llmperf.records.result import Check, Verdict, joined_reasons, worst_of
from pytest_llmperf.support import formats
from pytest_llmperf.support.user_input import is_positive

# One-sided confidence in "the bound holds", and in each end of the interval of what nothing bounds.
_HOLDS, _INTERVAL = 0.95, 0.975


@dataclass(frozen=True)
class Bounds:
    """What a ratio must keep; ``None`` bounds nothing; ValueError: a bound is not positive, or the bounds cross."""

    at_least: float | None = None
    at_most: float | None = None
    of: str = ""
    """What is bounded, for whoever reads that it cannot be."""

    def __post_init__(self) -> None:
        what = f"{self.of}_" if self.of else ""
        for name, bound in self:
            if not is_positive(bound):
                raise ValueError(f"{what}{name}={bound!r} must be a positive ratio, e.g. 1.2")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least={self.at_least} is above at_most={self.at_most}: no ratio can keep both")

    def __iter__(self) -> Iterator[tuple[str, float]]:
        both = ("at_least", self.at_least), ("at_most", self.at_most)
        return ((name, bound) for name, bound in both if bound is not None)

    def check(self, what: str, ratio: float, verdict: Verdict | None, interval: str = "") -> Check:
        """The check of the ``ratio`` of throughputs, or memories, that they bound."""
        told = " and ".join(f"{name.replace('_', ' ')} {bound:g}x" for name, bound in self)
        detail = f"{what} {ratio:.3g}x{interval}"
        return METRICS[f"{what}_ratio"].check(
            ratio,
            limit=next((bound for _, bound in self), None),
            verdict=verdict if told else None,
            detail=f"{detail}, to be {told}" if told else detail,
        )


@dataclass(frozen=True)
class Turns:
    pairs: tuple[tuple[Launch, Launch], ...]
    judgement: Judgement
    notes: tuple[str, ...]

    @property
    def before(self) -> tuple[Launch, ...]:
        return tuple(launch for launch, _ in self.pairs)

    @property
    def after(self) -> tuple[Launch, ...]:
        return tuple(launch for _, launch in self.pairs)

    @property
    def changed(self) -> tuple[str, ...]:
        """What is exact of two environments, and of the second is other."""
        return told_changes(self.after, self.before, Repeats.of(self.before) if self.after[-1].is_script else None)

    @property
    def other_evidence(self) -> tuple[str, ...]:
        """The same of two specs, whose losses may differ."""
        return changed_evidence(self.after, self.before)


def judge_environments(pairs: Pairs, policy: Policy, troubles: Sequence[str], extra: Sequence[Check]) -> Judgement:
    """The verdict on the second environment of each pair against the first: its speed, its phases, what it leaves."""
    judgement = judge_pairs(pairs, policy, troubles, extra)
    if judgement.verdict == "invalid":
        return judgement
    theirs, ours = zip(*pairs, strict=True)
    phases = phase_checks(ours, Reference(theirs, theirs, theirs), policy)
    growth, counts = growth_checks(ours, theirs, policy.rule.budget), tuple[Check, ...]()
    if ours[-1].is_script:  # which need not do the same in each launch
        counts = count_checks(ours, StoredTrace.of(theirs), Repeats.of(theirs))
    return joined(judgement, (*phases.checks, *growth, *counts), undecided=phases.undecided)


def judge_gain(pairs: Pairs, bounds: Mapping[str, Bounds], policy: Policy, troubles: Sequence[str] = ()) -> Judgement:
    """Whether the second spec of each pair keeps ``bounds`` over the first. ``bounds`` by ``throughput`` (tokens/s per
    GPU), ``memory`` (peak reserved of the worst rank) and ``loss`` (nats). Losses are exact and decided as measured;
    memory nearly so, by the leanest launch of each side: they may be of different pairs, and two pairs have to break
    its bound by themselves too; throughput by paired statistics. Without bounds the ratios are only told."""
    if troubles:
        return Judgement("invalid", joined_reasons(troubles), ())
    units = {measured([launch])[RATE].unit for pair in pairs for launch in pair}
    if len(units) > 1:
        how = "say tokens= of the script whose tokens nobody knows"
        return Judgement("invalid", f"a ratio of {' and '.join(sorted(units))} says nothing: {how}", ())
    throughput, undecided = _throughput(pairs, bounds.get("throughput", Bounds()), policy)
    memory = _memory(pairs, bounds.get("memory", Bounds()), policy.rule)
    checks = [throughput, memory, *_loss(pairs, bounds.get("loss", Bounds()).at_most)]
    verdict = worst_of(check.verdict for check in checks)
    # Losses are what they are: more launches show the same.
    undecided = (undecided or memory.verdict == "inconclusive") and verdict != "regressed"
    said = ", ".join(check.detail for check in checks)
    after = [launch for _, launch in pairs]
    # Their direction is the ratios'.
    rows = (measured(after)[name] for name in (RATE, MEMORY))
    shown = (replace(row.check(row.read(after)), higher_is_better=False) for row in rows)
    return Judgement(verdict, f"{said} ({len(pairs)} pair{'s' * (len(pairs) > 1)})", (*checks, *shown), undecided)


def keeps(beyond: float, each: Sequence[float], difference: Difference, rule: Rule) -> Verdict | None:
    """``pass``, ``regressed`` or ``inconclusive``: whether what is ``beyond`` a bound, in logarithms, stays there;
    ``each``: of every launch, or pair. ``None``: undecided, another is worth its cost. ``difference``: the noise."""
    held, broken = _confidences(difference, rule)
    if beyond > held * difference.error:
        return "pass"
    if beyond < -broken * difference.error and sum(one < 0 for one in each) >= min(CONFIRMED_BY, rule.budget):
        return "regressed"
    ahead = Outlook.of(difference, rule)
    may_hold = beyond + ahead.moves > held * ahead.error
    may_break = beyond - ahead.moves < -broken * ahead.error
    return None if ahead.left and (may_hold or may_break) else "inconclusive"


def _confidences(difference: Difference, rule: Rule) -> tuple[float, float]:
    """So many standard errors from a bound it is held, and so many it is broken."""
    return quantile(_HOLDS, difference.df), quantile(1 - rule.alpha / rule.budget, difference.df)


def _interval(bounds: Bounds, difference: Difference, rule: Rule) -> tuple[float, float]:
    """How many standard errors reach down and up, so that a bound is decided by the ends that are shown: it holds
    where it is outside of them on its good side, and is broken on the other."""
    held, broken = _confidences(difference, rule)
    low, high = ((held if bound else broken) for bound in (bounds.at_least, bounds.at_most))
    usual = quantile(_INTERVAL, difference.df)
    return (low, high) if any(True for _ in bounds) else (usual, usual)


def _throughput(pairs: Pairs, bounds: Bounds, policy: Policy) -> tuple[Check, bool]:
    """The check, and whether another pair is worth its cost."""
    difference = paired_difference(pairs, policy.noise)
    (before, after), error = pairs[0], difference.error
    # Step times compare work of one size; a ratio of rates also has to take other batches and other world sizes.
    tokens = work_of(after) / work_of(before)
    log = math.log(tokens) - difference.log
    down, up = _interval(bounds, difference, policy.rule)
    ratio, low, high = (math.exp(value) for value in (log, log - down * error, log + up * error))
    logs = [math.log(tokens) - each for each in difference.each]
    verdicts = []
    for name, bound in bounds:
        sign = 1 if name == "at_least" else -1
        beyond = [sign * (each - math.log(bound)) for each in (log, *logs)]
        verdicts.append(keeps(beyond[0], beyond[1:], difference, policy.rule))
    verdict = worst_of(verdict or "inconclusive" for verdict in verdicts)
    return bounds.check("throughput", ratio, verdict, f" ({low:.3g} to {high:.3g})"), None in verdicts


def _memory(pairs: Pairs, bounds: Bounds, rule: Rule) -> Check:
    leanest = tuple(min(launch.peak_reserved_bytes for launch in side) for side in zip(*pairs, strict=True))
    sides = [leanest, *((a.peak_reserved_bytes, b.peak_reserved_bytes) for a, b in pairs)]
    ratio, *each = (after / before if before else math.inf for before, after in sides)
    verdict: Verdict = "pass"
    for name, bound in bounds:
        broken = [one < bound if name == "at_least" else one > bound for one in (ratio, *each)]
        if broken[0]:
            is_confirmed = sum(broken[1:]) >= min(CONFIRMED_BY, rule.budget)
            verdict = worst_of([verdict, "regressed" if is_confirmed else "inconclusive"])
    return bounds.check("memory", ratio, verdict)


def _loss(pairs: Pairs, bound: float | None) -> Iterator[Check]:
    """How far apart the losses of one step are at most: whether two specs that see the same tokens learn alike. A
    kernel that computes wrong gradients is fast, fits, and shows here alone."""
    if bound is None:
        return
    apart = max(abs(a - b) for before, after in pairs for a, b in zip(before.losses, after.losses, strict=False))
    # How far training moved the loss: the first steps' mean over the last ones', nats.
    few = [(before.losses, max(1, len(before.losses) // 4)) for before, _ in pairs]
    moved = min(abs(fmean(losses[:num]) - fmean(losses[-num:])) for losses, num in few)
    detail = f"losses of one step {apart:.2g} apart at most, to be within {bound:g}"
    verdict: Verdict = "regressed" if apart > bound else "pass"
    if verdict == "pass" and bound > moved / 2:
        verdict = "inconclusive"
        detail += f"; but training moved them by {moved:.2g} alone, so that this shows nothing: more steps would"
    yield METRICS["loss_difference"].check(apart, limit=bound, verdict=verdict, detail=detail)


def exact_differences(then: Launch, now: Launch, policy: Policy) -> tuple[str, ...]:
    """What is counted, or exact, and not as it was ``then``; memory beyond its tolerance."""
    found = [f"{metric.removesuffix('_per_step')}: {a:g} -> {b:g}" for metric, a, b in _other_counts(then, now)]
    tolerance = policy.in_pairs().tolerances[MEMORY]
    if abs(now.peak_reserved_bytes - then.peak_reserved_bytes) > tolerance * then.peak_reserved_bytes:
        memory = " -> ".join(formats.memory(launch.peak_reserved_bytes) for launch in (then, now))
        found.append(f"peak memory: {memory}")
    return (*found, *changes((now,), (then,)))


def _other_counts(then: Launch, now: Launch) -> Iterator[tuple[str, float, float]]:
    for metric in counts():
        a, b = count_of(then, metric), count_of(now, metric)
        if a is not None and b is not None and a != b:
            yield metric, a, b


@dataclass(frozen=True)
class Change:
    """A ratio of step times, as a logarithm: between ``low`` and ``high`` with 95 %."""

    log: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: Pairs, policy: Policy) -> Change:
        difference = paired_difference(pairs, policy.noise)
        wide = quantile(_INTERVAL, difference.df) * difference.error
        return cls(difference.log, difference.log - wide, difference.log + wide)

    def since(self, good: Change | None) -> Change:
        """Over ``good``, which is held against the same end; ``None`` is that end itself."""
        if good is None:
            return self
        log, wide = self.log - good.log, math.hypot(self.log - self.low, good.log - good.low)
        return Change(log, log - wide, log + wide)


# Bisection: what tells bad from good, and on which side others are.

#: What is known of a candidate: like the good end, like the bad one, or that nothing can be.
Side = Literal["good", "bad", "skipped"]
By = Literal["speed", "memory", "counts", "evidence"]
#: What a bisection may go by.
CRITERIA: tuple[By, ...] = ("speed", "memory", "counts", "evidence")
# A CPU's clock tells less than its counts.
_ON_CPU: tuple[By, ...] = ("counts", "speed", "memory", "evidence")
# Two are the same where the interval of their difference, a logarithm, is within this.
_SAME = 0.003
_MIDDLE = 0.5


@dataclass(frozen=True)
class Yardstick:
    """What tells bad from good: of speed and memory the logarithm of bad over good (step times, bytes) and speed's
    error; of counts the metric, and good's and bad's; of evidence the lines that changed."""

    by: By
    size: float = 0.0
    error: float = 0.0
    metric: str = ""
    ends: tuple[float, float] = (0.0, 0.0)
    lines: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Look:
    """What some pairs say, by themselves or of the ends; ``goes_on``: another pair is worth its cost."""

    goes_on: bool
    side: Side | None = None
    reason: str = ""
    yardstick: Yardstick | None = None
    """Of the ends; neither this nor ``goes_on``: a tie."""


def criteria(by: By | None, *, on_cpu: bool) -> Sequence[By]:
    """What to look at, in this order, where ``by`` is asked for, or anything."""
    return (by,) if by else _ON_CPU if on_cpu else CRITERIA


def compared_ends(pairs: Pairs, policy: Policy, order: Sequence[By], *, alpha: float, budget: int) -> Look:
    """In what good and bad differ by ``pairs`` of (good, bad): the first of ``order`` that tells them apart."""
    for one in order:
        if one == "speed":
            difference = paired_difference(pairs, policy.noise)
            # A user who asks for speed has looked at it; else a CPU's clock tells what is far beyond its noise.
            least = 0.0 if len(order) == 1 or order == CRITERIA else math.log1p(policy.in_pairs().tolerances[RATE])
            if is_shown(difference.log, difference, alpha / 2, budget) and abs(difference.log) > least:
                # Each beyond half of it by itself: one may have met a neighbour.
                half, sign = abs(difference.log) / 2, math.copysign(1.0, difference.log)
                if sum(sign * each > half for each in difference.each) >= min(CONFIRMED_BY, budget):
                    return Look(False, yardstick=Yardstick("speed", difference.log, difference.error))
                if len(pairs) < budget:
                    return Look(True)
            elif _may_show(difference, least, alpha / 2, budget):
                return Look(True)
        elif (found := _exact(one, pairs, policy)) is not None:
            return Look(False, yardstick=found)
    return Look(False)


def side_of(pairs: Pairs, yardstick: Yardstick, policy: Policy, *, alpha: float, budget: int) -> Look:
    """On which side of the middle the second of ``pairs`` is; the first is the good end."""
    before, after = pairs[-1]
    # 0: as the good end, 1: as the bad one.
    if yardstick.by == "memory":
        position = _memory_log(pairs) / yardstick.size
    elif yardstick.by == "counts":
        count, (good, bad) = count_of(after, yardstick.metric), yardstick.ends
        if count is None:
            return Look(False, "skipped", f"its launches do not tell of {yardstick.metric}")
        position = (count - good) / (bad - good)
    elif yardstick.by == "evidence":
        position = len(yardstick.lines & {*changes((after,), (before,))}) / len(yardstick.lines)
    else:
        return side_of_difference(paired_difference(pairs, policy.noise), yardstick, alpha=alpha, budget=budget)
    return Look(False, "bad" if position > _MIDDLE else "good")


def side_of_difference(difference: Difference, yardstick: Yardstick, *, alpha: float, budget: int) -> Look:
    """The same of speed: Wald's test (1945) of "as good" against "as bad", by the change that is sure at least."""
    size = yardstick.size
    beyond = math.copysign(1.0, size) * (difference.log - size / 2)
    # Were the change smaller than it was seen, the two would be nearer to one another than the test takes them for.
    sure = max(0.0, abs(size) - yardstick.error)
    # How well the noise is known widens Student's quantile over the normal one, and this by its square.
    heavier = (quantile(1 - alpha, difference.df) / quantile(1 - alpha, math.inf)) ** 2
    needed = heavier * math.log(1 / alpha)
    reach = needed * difference.error**2 / sure if sure else math.inf
    if abs(beyond) > min(reach, quantile(1 - alpha / budget, difference.df) * difference.error):
        return Look(False, "bad" if beyond > 0 else "good")
    ahead, far = Outlook.of(difference, Rule(alpha=alpha, budget=budget)), quantile(1 - alpha / budget, difference.df)
    nearest = needed * ahead.error**2 / sure if sure else math.inf
    if ahead.left and abs(beyond) + ahead.moves > min(nearest, far * ahead.error):
        return Look(True)
    num = len(difference.each)
    where = f"{math.expm1(difference.log):+.1%} of step time, too near the middle between good and bad"
    return Look(False, "skipped", f"undecided by {num} pair{'s' * (num > 1)}: {where}")


def is_shown(beyond: float, difference: Difference, alpha: float, budget: int) -> bool:
    """Whether something is ``beyond`` 0 by more than the noise, at one of ``budget`` looks; ``alpha``: one-sided."""
    return abs(beyond) > quantile(1 - alpha / budget, difference.df) * difference.error


def _may_show(difference: Difference, least: float, alpha: float, budget: int) -> bool:
    ahead = Outlook.of(difference, Rule(alpha=alpha, budget=budget))
    reach = quantile(1 - alpha / budget, difference.df) * ahead.error
    is_same = abs(difference.log) + quantile(0.975, difference.df) * difference.error < _SAME
    return ahead.left > 0 and not is_same and abs(difference.log) + ahead.moves > max(reach, least)


def _exact(by: By, pairs: Pairs, policy: Policy) -> Yardstick | None:
    (before, after) = pairs[-1]
    if by == "memory":
        log = _memory_log(pairs)
        return Yardstick(by, log) if abs(log) > math.log1p(policy.in_pairs().tolerances[MEMORY]) else None
    if by == "evidence":
        lines = frozenset(changes((after,), (before,)))
        return Yardstick(by, lines=lines) if lines else None
    moved = next(_other_counts(before, after), None)
    return None if moved is None else Yardstick(by, metric=moved[0], ends=moved[1:])


def _memory_log(pairs: Pairs) -> float:
    before, after = (min(launch.peak_reserved_bytes for launch in side) for side in zip(*pairs, strict=True))
    return math.log(after / before) if before and after else 0.0
