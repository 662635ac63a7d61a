"""Gain: what one spec brings over another, as ratios that took turns on the same hardware, and bounds on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.policy import METRICS, Policy
from pytest_llmperf.judge.sequential_test import Outlook, Rule
from pytest_llmperf.judge.verdict import Judgement
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Check, Verdict, worst_of
from pytest_llmperf.support.quantities import is_positive

# A bound counts as broken only once this many pairs broke it, each by itself.
_CONFIRMED = 2

# One-sided confidence in "the bound holds", and two-sided in the interval that is shown.
_HOLDS, _INTERVAL = 0.95, 0.975


@dataclass(frozen=True)
class Bounds:
    """What a ratio must keep; ``None`` bounds nothing.

    Raises:
        ValueError: a bound that is no positive number, or a lower one above its upper one.
    """

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


def judge_gain(pairs: Sequence[tuple[Launch, Launch]], bounds: Mapping[str, Bounds], policy: Policy) -> Judgement:
    """Whether the second spec of each pair keeps ``bounds`` over the first.

    ``bounds`` by ``throughput`` (tokens/s per GPU), ``memory`` (peak reserved of the worst rank) and ``loss`` (nats).
    Losses are exact and decided as measured; memory nearly so, by the leanest launch of each side: they may be of
    different pairs, and two pairs have to break its bound by themselves too; throughput by paired statistics. Without
    bounds the ratios are only told.
    """
    throughput, undecided = _throughput(pairs, bounds.get("throughput", Bounds()), policy)
    memory = _memory(pairs, bounds.get("memory", Bounds()), policy.rule)
    checks = [throughput, memory, *_loss(pairs, bounds.get("loss", Bounds()).at_most)]
    verdict = worst_of(check.verdict for check in checks)
    # Losses are what they are: more launches show the same.
    undecided = (undecided or memory.verdict == "inconclusive") and verdict != "regressed"
    said = ", ".join(check.detail for check in checks)
    after = [launch for _, launch in pairs]
    shown = (
        Check(metric=name, value=METRICS[name].of(after), unit=METRICS[name].unit)
        for name in ("tokens_per_second_per_gpu", "peak_reserved_bytes")
    )
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
    if beyond < -broken * difference.error and sum(one < 0 for one in each) >= min(_CONFIRMED, rule.budget):
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
    tokens = (after.tokens_per_step / len(after.ranks)) / (before.tokens_per_step / len(before.ranks))
    log = math.log(tokens) - difference.log
    wide = stats.quantile(_INTERVAL, difference.df) * error
    ratio, low, high = (math.exp(value) for value in (log, log - wide, log + wide))
    detail = f"throughput {ratio:.3g}x ({low:.3g} to {high:.3g})"
    verdicts, told = [], []
    logs = [math.log(tokens) - each for each in difference.each]
    for name, bound in bounds:
        sign = 1 if name == "at_least" else -1
        beyond = [sign * (each - math.log(bound)) for each in (log, *logs)]
        verdicts.append(keeps(beyond[0], beyond[1:], difference, policy.rule))
        told.append(f"{name.replace('_', ' ')} {bound:g}x")
    check = Check(
        metric="throughput_ratio",
        value=ratio,
        unit="1",
        limit=next((bound for _, bound in bounds), None),
        verdict=worst_of(verdict or "inconclusive" for verdict in verdicts) if verdicts else None,
        detail=f"{detail}, to be {' and '.join(told)}" if told else detail,
    )
    return check, None in verdicts


def _memory(pairs: Sequence[tuple[Launch, Launch]], bounds: Bounds, rule: Rule) -> Check:
    before, after = (min(launch.peak_reserved_bytes for launch in side) for side in zip(*pairs, strict=True))
    ratio = _over(after, before)
    each = [_over(b.peak_reserved_bytes, a.peak_reserved_bytes) for a, b in pairs]
    broken_by = [
        sum(_breaks(one, name, bound) for one in each) for name, bound in bounds if _breaks(ratio, name, bound)
    ]
    is_confirmed = max(broken_by, default=0) >= min(_CONFIRMED, rule.budget)
    told = [f"{name.replace('_', ' ')} {bound:g}x" for name, bound in bounds]
    detail = f"memory {ratio:.3g}x"
    return Check(
        metric="memory_ratio",
        value=ratio,
        unit="1",
        limit=next((bound for _, bound in bounds), None),
        verdict=None if not told else "pass" if not broken_by else "regressed" if is_confirmed else "inconclusive",
        detail=f"{detail}, to be {' and '.join(told)}" if told else detail,
    )


def _over(after: float, before: float) -> float:
    return after / before if before else math.inf


def _breaks(ratio: float, name: str, bound: float) -> bool:
    return ratio < bound if name == "at_least" else ratio > bound


def _loss(pairs: Sequence[tuple[Launch, Launch]], bound: float | None) -> Iterator[Check]:
    """How far apart the losses of one step are at most: whether two specs that see the same tokens learn alike.

    A kernel that computes wrong gradients is fast, fits, and shows here alone.
    """
    if bound is None:
        return
    apart = max(abs(a - b) for before, after in pairs for a, b in zip(before.losses, after.losses, strict=False))
    moved = min(_learnt(before.losses) for before, _ in pairs)
    detail = f"losses of one step {apart:.2g} apart at most, to be within {bound:g}"
    verdict: Verdict = "regressed" if apart > bound else "pass"
    if verdict == "pass" and bound > moved / 2:
        verdict = "inconclusive"
        detail += f"; but training moved them by {moved:.2g} alone, so that this shows nothing: more steps would"
    yield Check(metric=_LOSS, value=apart, unit="nat", limit=bound, verdict=verdict, detail=detail)


_LOSS = "loss_difference"


def _learnt(losses: Sequence[float]) -> float:
    """How far training moved the loss: the first steps' mean over the last ones', nats."""
    few = max(1, len(losses) // 4)
    return abs(fmean(losses[:few]) - fmean(losses[-few:]))
