"""Gain: what one spec brings over another, as ratios that took turns on the same hardware, and bounds on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import CONFIRMED_BY, Decision, Outlook, Policy, Rule, decide
from pytest_llmperf.judge.stats import Difference, Noise, log_of, variance_of, within_sessions, work_of
from pytest_llmperf.judge.verdict import Decided, Judgement
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, METRICS, RATE, centre, measured
from pytest_llmperf.records.result import VERDICTS, Check, Verdict, worst_of
from pytest_llmperf.support.formats import percent
from pytest_llmperf.support.user_input import is_positive

# One-sided confidence in "the bound holds", and two-sided in the interval that is shown.
_HOLDS, _INTERVAL = 0.95, 0.975


@dataclass(frozen=True)
class Bounds:
    """What a ratio must keep; ``None`` bounds nothing; ValueError: a bound that is no positive number, or a lower one
    above its upper one."""

    at_least: float | None = None
    at_most: float | None = None
    of: str = ""
    """What is bounded, for whoever reads that it cannot be."""

    def __post_init__(self) -> None:
        what = f"{self.of}_" if self.of else ""
        for name, bound in self._both():
            if bound is not None and not is_positive(bound):
                raise ValueError(f"{what}{name}={bound!r} must be a positive ratio, e.g. 1.2")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least={self.at_least} is above at_most={self.at_most}: no ratio can keep both")

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return ((name, bound) for name, bound in self._both() if bound is not None)

    def _both(self) -> tuple[tuple[str, Any], ...]:
        return ("at_least", self.at_least), ("at_most", self.at_most)

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


def judge_gain(pairs: Sequence[tuple[Launch, Launch]], bounds: Mapping[str, Bounds], policy: Policy) -> Judgement:
    """Whether the second spec of each pair keeps ``bounds`` over the first.

    ``bounds`` by ``throughput`` (tokens/s per GPU), ``memory`` (peak reserved of the worst rank) and ``loss`` (nats).
    Losses are exact and decided as measured; memory nearly so, by the leanest launch of each side: they may be of
    different pairs, and two pairs have to break its bound by themselves too; throughput by paired statistics. Without
    bounds the ratios are only told.
    """
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


def keeps(beyond: float, each: Sequence[float], difference: stats.Difference, rule: Rule) -> Verdict | None:
    """``pass``, ``regressed`` or ``inconclusive``: whether what is ``beyond`` a bound, in logarithms, stays there.

    ``None``: not decided, and another launch, or pair, is worth its cost. ``each`` is the same of every one, and
    ``difference`` tells the noise.
    """
    held = stats.quantile(_HOLDS, difference.df)
    broken = stats.quantile(1 - rule.alpha / rule.budget, difference.df)
    if beyond > held * difference.error:
        return "pass"
    if beyond < -broken * difference.error and sum(one < 0 for one in each) >= min(CONFIRMED_BY, rule.budget):
        return "regressed"
    ahead = Outlook.of(difference, rule)
    may_hold = beyond + ahead.moves > held * ahead.error
    may_break = beyond - ahead.moves < -broken * ahead.error
    return None if ahead.left and (may_hold or may_break) else "inconclusive"


def _throughput(pairs: Sequence[tuple[Launch, Launch]], bounds: Bounds, policy: Policy) -> tuple[Check, bool]:
    """The check, and whether another pair is worth its cost."""
    difference = stats.paired_difference(pairs, policy.noise)
    (before, after), error = pairs[0], difference.error
    # Step times compare work of one size; a ratio of rates also has to take other batches and other world sizes.
    tokens = work_of(after) / work_of(before)
    log = math.log(tokens) - difference.log
    wide = stats.quantile(_INTERVAL, difference.df) * error
    ratio, low, high = (math.exp(value) for value in (log, log - wide, log + wide))
    logs = [math.log(tokens) - each for each in difference.each]
    verdicts = []
    for name, bound in bounds:
        sign = 1 if name == "at_least" else -1
        beyond = [sign * (each - math.log(bound)) for each in (log, *logs)]
        verdicts.append(keeps(beyond[0], beyond[1:], difference, policy.rule))
    verdict = worst_of(verdict or "inconclusive" for verdict in verdicts)
    return bounds.check("throughput", ratio, verdict, f" ({low:.3g} to {high:.3g})"), None in verdicts


def _memory(pairs: Sequence[tuple[Launch, Launch]], bounds: Bounds, rule: Rule) -> Check:
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


def _loss(pairs: Sequence[tuple[Launch, Launch]], bound: float | None) -> Iterator[Check]:
    """How far apart the losses of one step are at most: whether two specs that see the same tokens learn alike.

    A kernel that computes wrong gradients is fast, fits, and shows here alone.
    """
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


# Scaling efficiency: a GPU's rate in a wide case over its rate at a narrow width, and the verdict on it.

METRIC = "scaling_efficiency"


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """The width that a case's efficiency is over."""

    gpus: int
    launches: tuple[Launch, ...]
    """Of this run; where it measured none, those of the baseline."""
    baseline: Baseline | None
    """As it was before this run recorded anything."""
    in_this_run: bool

    @property
    def name(self) -> str:
        """``1 GPU of this run``."""
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)} {'of this run' if self.in_this_run else 'as stored'}"


@dataclass(frozen=True)
class Terms:
    """What a test asks of its efficiency."""

    at_least: float | None = None
    tolerance: float | None = None
    """Fraction by which it may fall below the baseline's; ``None``: as throughput may."""


def judge_efficiency(
    launches: Sequence[Launch], baseline: Baseline | None, narrow: Narrow, policy: Policy, terms: Terms
) -> Decided:
    """The efficiency of ``launches`` over ``narrow``, held against a floor and against both widths' baselines.

    It is ``regressed`` against the baselines only where both words agree: the ratio fell, and the wide case itself is
    slower. Where the narrow width was not measured in this run the ratio says no more than throughput does, and gates
    by its floor alone.
    """
    value = METRICS[RATE].read(launches) / METRICS[RATE].read(narrow.launches)
    check = METRICS[METRIC].check(value, detail=f"over {narrow.name}")
    verdicts: list[Verdict] = []
    undecided = False
    if baseline is not None and narrow.baseline is not None:
        found = _beside_baselines(check, launches, (baseline, narrow), policy, terms)
        check, undecided = found.check, found.undecided
        verdicts += [check.verdict] if check.verdict else []
    if terms.at_least is not None:
        kept = _floor(launches, narrow, terms.at_least, policy)
        verdicts.append(kept or "inconclusive")
        floor = f"; its test asks for {terms.at_least * 100:g} %"
        check = replace(check, limit=max(terms.at_least, check.limit or 0.0), detail=check.detail + floor)
        undecided |= kept is None
    verdict = worst_of(verdicts) if verdicts else None
    return Decided(replace(check, verdict=verdict), undecided and verdict != "regressed")


def _beside_baselines(
    check: Check, launches: Sequence[Launch], widths: tuple[Baseline, Narrow], policy: Policy, terms: Terms
) -> Decided:
    baseline, narrow = widths
    own = policy.difference(launches, baseline.launches)
    if not narrow.in_this_run or narrow.baseline is None:
        ratio = math.exp(-own.log)
        return Decided(replace(check, baseline=check.value / ratio, change=ratio - 1))
    other = policy.difference(narrow.launches, narrow.baseline.launches)
    both = less(own, other)
    tolerance = terms.tolerance or max(
        policy.at(launches, baseline).tolerances.get(RATE, 0.0),
        policy.at(narrow.launches, narrow.baseline).tolerances.get(RATE, 0.0),
    )
    ratio = math.exp(-both.log)
    check = replace(check, baseline=check.value / ratio, change=ratio - 1)
    if not tolerance:  # a user's policy without one: shown, and gates nothing
        return Decided(check)
    of_ratio, of_own = decide(both, tolerance, policy.rule), decide(own, tolerance, policy.rule)
    verdict = milder(of_ratio.verdict or "inconclusive", of_own.verdict or "inconclusive")
    check = replace(
        check,
        tolerance=tolerance,
        limit=check.value / ratio * math.exp(-of_ratio.alarm_log),
        detectable=of_ratio.detectable / (1 + of_ratio.detectable),
        verdict=verdict,
        detail=check.detail + _cause(of_ratio, of_own, math.exp(-other.log) - 1),
    )
    return Decided(check, undecided=verdict == "inconclusive" and None in (of_ratio.verdict, of_own.verdict))


def less(wide: Difference, narrow: Difference) -> Difference:
    """By how much more ``wide`` slowed down than ``narrow``: of a ratio of the two, the noise of both.

    They are taken to be independent. A host or a day that moved both alike would make the ratio better known than
    that, never worse. Degrees of freedom: Satterthwaite (1946).
    """
    variance, df = variance_of([(wide.error**2, wide.df), (narrow.error**2, narrow.df)])
    each = tuple(each - narrow.log for each in wide.each)
    return Difference(wide.log - narrow.log, math.sqrt(variance), df, wide.launch_sd, each)


def milder(ratio: Verdict, own: Verdict) -> Verdict:
    """The verdict on which both words agree: a loss needs both to say so, and so does a gain."""
    if ratio == own == "improved":
        return "improved"
    plain: list[Verdict] = ["pass" if verdict == "improved" else verdict for verdict in (ratio, own)]
    return max(plain, key=VERDICTS.index)


def _cause(of_ratio: Decision, of_own: Decision, narrow_change: float) -> str:
    """What moved, where one of the two did and the other did not."""
    lost = [decision.verdict == "regressed" for decision in (of_ratio, of_own)]
    if all(lost) or not any(lost):
        return ""
    told = f"; that width's own rate changed by {percent(narrow_change)}"
    if lost[0]:
        return f"{told}, this case's is not shown to be slower"
    return told + (": it is not scaling that was lost" if of_ratio.verdict == "pass" else "")


def _floor(launches: Sequence[Launch], narrow: Narrow, at_least: float, policy: Policy) -> Verdict | None:
    """Whether the efficiency on this host is ``at_least`` so much, as ``keeps`` says it."""
    difference = _apart(launches, narrow.launches, policy.noise, here=narrow.in_this_run)
    # Step times compare work of one size; widths that share a global batch differ in it.
    wide, one = (work_of(side[0]) for side in (launches, narrow.launches))
    shift = math.log(wide / one) - math.log(at_least)
    return keeps(shift - difference.log, [shift - each for each in difference.each], difference, policy.rule)


def _apart(wide: Sequence[Launch], narrow: Sequence[Launch], noise: Noise, *, here: bool) -> Difference:
    """The step times of one width against another's; of one host (``here``) by what its launches and days scatter."""
    if not here:
        return stats.difference(wide, narrow, noise)
    spread = noise.launch.moderated(within_sessions(wide, narrow))
    # A launch that ended before its median was known scatters by that much more.
    squares = [fmean(max(spread.sd, launch.median_error) ** 2 for launch in group) for group in (wide, narrow)]
    # A day may move one width and not the other: a floor is no word about tonight alone. And two widths of one run need
    # not have had the same GPUs, nor the same host.
    ranks = [[rank for launch in group for rank in launch.ranks] for group in (wide, narrow)]
    gpus, hosts = (
        [{tuple(getattr(rank, name) for name in names) for rank in each} for each in ranks]
        for names in (("host", "boot", "device"), ("host", "boot"))
    )
    levels = [noise.session]
    levels += [] if gpus[0] & gpus[1] else [noise.site]
    levels += [] if hosts[0] & hosts[1] else [noise.host]
    of_launches = squares[0] / len(wide) + squares[1] / len(narrow)
    variance, df = variance_of([(of_launches, spread.df), *((2 * level.sd**2, level.df) for level in levels)])
    expected = centre([log_of(launch) for launch in narrow])
    each = tuple(log_of(launch) - expected for launch in wide)
    slower = centre([log_of(launch) for launch in wide]) - expected
    return Difference(slower, math.sqrt(variance), df, math.sqrt(squares[0]), each)
