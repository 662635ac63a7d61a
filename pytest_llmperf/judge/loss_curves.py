"""Verdict: whether a training still learns what it did, loss by loss, seed beside the same seed. Pure.

One-sided tests in both directions, as for MLPerf's reference convergence points, where also what converges faster than
the reference is refused. A seed's order of rows and its initial weights are in both trainings of a pair and cancel; if
they no longer do (another generator of random numbers), pairs only scatter more, and the tests hold all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, stdev, variance
from typing import Any, ClassVar, Literal

from pytest_llmperf.judge.integrity import same_settings
from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.records.loss_curve import CurveWord, JudgedCurve, JudgedPart
from pytest_llmperf.support import codec

# Parts: the losses of a training as a few means, each over as many steps as all before it. Pure.


#: So that no part is empty.
FEWEST_STEPS = 16

_PARTS = 4


@dataclass(frozen=True)
class Span:
    """Steps, counted from 1."""

    first: int
    last: int


def spans(steps: int) -> tuple[Span, ...]:
    """Those of a training of so many steps: ``2 to 12, 13 to 25, 26 to 50, 51 to 100``.

    Raises:
        ValueError: there are fewer than ``FEWEST_STEPS``.
    """
    if steps < FEWEST_STEPS:
        raise ValueError(f"{steps} steps, expected {FEWEST_STEPS} or more")
    ends = [1, *(steps >> shift for shift in reversed(range(_PARTS)))]
    return tuple(Span(before + 1, end) for before, end in pairwise(ends))


def parts_of(losses: Sequence[float]) -> tuple[float, ...]:
    """The mean loss of each span, in nats a token.

    Raises:
        ValueError: there are fewer than ``FEWEST_STEPS``.
    """
    return tuple(fmean(losses[span.first - 1 : span.last]) for span in spans(len(losses)))


# Spread: how far apart trainings of other seeds are in each part, and what difference beside that is none. Pure.


# Of a standard deviation between seeds: the mean of sixteen trainings is not known better than that.
_SHARE = 0.25
# Of the loss: about twice what rounding was seen to do to one, and a part is a mean of many.
_ROUNDING = 0.001


@dataclass(frozen=True)
class SeedSpread:
    """Of one part."""

    mean: float
    """Nats a token."""
    sd: float

    @property
    def nothing(self) -> float:
        """Up to here a difference in the mean loss is none, in nats."""
        return max(_SHARE * self.sd, _ROUNDING * self.mean)


def spreads(curves: Sequence[Sequence[float]]) -> tuple[SeedSpread, ...]:
    """Of each part, over the losses of two seeds or more."""
    by_part = zip(*map(parts_of, curves), strict=True)
    return tuple(SeedSpread(fmean(part), stdev(part)) for part in by_part)


#: False alarms of a case that learns what it did, in one run at most.
ALARMS = 0.001

#: Without three, nobody knows how far apart seeds are.
FEWEST_SEEDS = 3

# A quarter for what two seeds show, where only gross faults do.
_EARLY_SHARE, _EARLY_SEEDS = 0.25, 2

# Of the interval in which a difference is looked for, each side.
_CONFIDENCE = 0.95

_HOW: Mapping[CurveWord, str] = {
    "worse": "it learns more slowly",
    "faster": "it learns faster than it may, as with labels that leak",
}

# Nine digits are kept of a loss.
_LAST_DIGIT = 5e-9


@dataclass(frozen=True)
class _Part:
    """One part of the seeds that were trained."""

    span: Span
    spread: SeedSpread
    """Of all that is stored."""
    now: Sequence[float]
    then: Sequence[float]
    """Of the same seeds."""

    @property
    def differences(self) -> list[float]:
        return [now - then for now, then in zip(self.now, self.then, strict=True)]


@dataclass(frozen=True)
class _Look:
    """How far a part's trainings are from what is stored, and how well that is known."""

    difference: float
    error: float
    df: float
    level: float
    """Of false alarms, in one direction."""

    def beyond(self, nothing: float) -> float:
        """The least difference that it tells from ``nothing``."""
        return nothing + self.error * quantile(1 - self.level, self.df)


def judge_curve(trained: Mapping[int, Sequence[float]], stored: Mapping[int, Sequence[float]]) -> JudgedCurve:
    """The losses of the seeds that were ``trained``, the first of the ``stored`` ones, each as many.

    One seed tells that all is as it was. Where it does not, the next ones have to be trained: ``undecided``, until all
    that are stored were, or two show a fault that no seed would.
    """
    seeds = tuple(trained)
    everything = spreads(list(stored.values()))
    now, then = (list(zip(*(parts_of(curves[seed]) for seed in seeds), strict=True)) for curves in (trained, stored))
    steps = len(next(iter(stored.values())))
    parts = [
        _Part(span, spread, one, other)
        for span, spread, one, other in zip(spans(steps), everything, now, then, strict=True)
    ]
    looks = _looks(parts, len(stored), num_parts=len(parts))
    judged = tuple(_judged(part, look) for part, look in zip(parts, looks, strict=True))
    word, reason = _decided(trained, stored, parts, looks, judged)
    return JudgedCurve(verdict=word, reason=reason, seeds=seeds, stored_seeds=len(stored), parts=judged)


def _decided(
    trained: Mapping[int, Sequence[float]],
    stored: Mapping[int, Sequence[float]],
    parts: Sequence[_Part],
    looks: Sequence[_Look | None],
    judged: Sequence[JudgedPart],
) -> tuple[CurveWord, str]:
    of_seeds = f"{len(trained)} of {len(stored)} seeds"
    if all(_are_equal(losses, stored[seed]) for seed, losses in trained.items()):
        return "same", f"the same to the last digit ({of_seeds})"
    furthest = max(judged, key=lambda part: abs(part.difference) / part.nothing)
    if len(trained) == 1:
        is_near = all(abs(part.difference) <= part.nothing for part in judged)
        return ("same" if is_near else "undecided"), _beside(furthest, of_seeds)
    told = max(_told(judged), key=lambda part: abs(part.difference) / (part.seen or math.inf), default=None)
    if told is not None:
        word: CurveWord = "worse" if told.difference > 0 else "faster"
        return word, f"{_beside(told, of_seeds)}: {_HOW[word]}"
    if len(trained) < len(stored):
        return "undecided", _beside(furthest, of_seeds)
    if all(look and _is_nothing(part, look) for part, look in zip(parts, looks, strict=True)):
        return "same", _beside(furthest, of_seeds)
    least = (furthest.seen or 0.0) / furthest.stored
    return "undecided", f"{_beside(furthest, of_seeds)}, only {least:.2%} or more would have been told"


def _are_equal(losses: Sequence[float], stored: Sequence[float]) -> bool:
    return all(abs(now - then) <= _LAST_DIGIT * abs(then) for now, then in zip(losses, stored, strict=True))


def _told(judged: Sequence[JudgedPart]) -> Iterator[JudgedPart]:
    return (part for part in judged if part.seen is not None and abs(part.difference) > part.seen)


def _is_nothing(part: _Part, look: _Look) -> bool:
    """Whether a difference is none, and cannot well be as much as another seed's."""
    reach = abs(look.difference) + look.error * quantile(_CONFIDENCE, look.df)
    return abs(look.difference) <= part.spread.nothing and reach <= part.spread.sd


def _looks(parts: Sequence[_Part], num_stored: int, num_parts: int) -> list[_Look | None]:
    """Two of the seeds are held against all that are stored, all of them in pairs; between there is no test."""
    num = len(parts[0].now)
    tests = 2 * num_parts  # one in each direction
    if num == num_stored:
        share = 1 - _EARLY_SHARE if num > _EARLY_SEEDS else 1.0
        return [_paired(part, ALARMS * share / tests) for part in parts]
    if num == _EARLY_SEEDS:
        return [_two_samples(part, num_stored, ALARMS * _EARLY_SHARE / tests) for part in parts]
    return [None for _ in parts]


def _paired(part: _Part, level: float) -> _Look:
    differences = part.differences
    error = stdev(differences) / math.sqrt(len(differences))
    return _Look(fmean(differences), error, len(differences) - 1, level)


def _two_samples(part: _Part, num_stored: int, level: float) -> _Look:
    """Of equal variance: so few of the one side have none of their own worth knowing."""
    num, df = len(part.now), len(part.now) + num_stored - 2
    pooled = (variance(part.now) * (num - 1) + part.spread.sd**2 * (num_stored - 1)) / df
    error = math.sqrt(pooled * (1 / num + 1 / num_stored))
    return _Look(fmean(part.now) - part.spread.mean, error, df, level)


def _judged(part: _Part, look: _Look | None) -> JudgedPart:
    nothing = part.spread.nothing
    # Two are held against the mean of all, so that is what they stand beside.
    stored = fmean(part.now) - look.difference if look else fmean(part.then)
    return JudgedPart(
        first=part.span.first,
        last=part.span.last,
        loss=fmean(part.now),
        stored=stored,
        nothing=nothing,
        seen=look.beyond(nothing) if look else None,
    )


def _beside(part: JudgedPart, of_seeds: str) -> str:
    """``loss of steps 51 to 100 is 5.672, 5.613 is stored: +1.05 %, up to 0.19 % is nothing (5 of 5 seeds)``."""
    share = part.difference / part.stored
    nothing = part.nothing / part.stored
    return (
        f"loss of steps {part.first} to {part.last} is {part.loss:.4f}, {part.stored:.4f} is stored: {share:+.2%}, "
        f"up to {nothing:.2%} is nothing ({of_seeds})"
    )


# CurveBaseline: the losses of several seeds of one spec, and who accepted them when. Its JSON. Pure.


#: In place of a machine kind: losses are none of a machine's, to within rounding.
LOSS_CURVES: Literal["loss-curves"] = "loss-curves"


@dataclass(frozen=True, kw_only=True)
class SeedCurve:
    """One training."""

    seed: int
    losses: tuple[float, ...]
    """Of each step, in nats a token, as rank 0 printed it."""


@codec.sparse("machine", "versions")
@dataclass(frozen=True, kw_only=True)
class CurveBaseline:
    """What the loss curve of a spec is held against."""

    id: str
    digest: str
    spec: Mapping[str, Any]
    recorded_by: str
    recorded_at: str
    """UTC, ISO 8601."""
    curves: tuple[SeedCurve, ...]
    """The spec's own seed first."""
    machine: Literal["loss-curves"] = LOSS_CURVES
    reason: str = ""
    revision: str = ""
    """Commit of the tree that trained; empty where there is none."""
    device: str = ""
    """What they were trained on."""
    versions: Mapping[str, str] = field(default_factory=dict)
    on_cpu: bool = False
    """Whether a run of the cases for the CPU recorded them: one of those for GPUs asks for others."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(curve.seed for curve in self.curves)

    @property
    def steps(self) -> int:
        return len(self.curves[0].losses)

    @property
    def losses(self) -> dict[int, tuple[float, ...]]:
        """By seed, in their order."""
        return {curve.seed: curve.losses for curve in self.curves}

    noun: ClassVar[str] = "loss curves"

    def check(self) -> None:
        same_settings(self.spec, self.digest)
        seeds = [curve.seed for curve in self.curves]
        if len(set(seeds)) < max(len(seeds), FEWEST_SEEDS):
            raise ValueError(f"its seeds are {', '.join(map(str, seeds)) or 'none'}, expected {FEWEST_SEEDS} or more")
        lengths = sorted({len(curve.losses) for curve in self.curves})
        if len(lengths) > 1 or lengths[0] < FEWEST_STEPS:
            raise ValueError(
                f"its curves are of {', '.join(map(str, lengths))} steps, expected the same {FEWEST_STEPS} or more"
            )
        if not all(math.isfinite(loss) for curve in self.curves for loss in curve.losses):
            raise ValueError("a loss is no number")
