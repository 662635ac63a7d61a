"""Verdict: whether a training still learns what it did, loss by loss, seed beside the same seed. Pure.

One-sided tests in both directions, as for MLPerf's reference convergence points, where also what converges faster than
the reference is refused. A seed's order of rows and its initial weights are in both trainings of a pair and cancel; if
they no longer do (another generator of random numbers), pairs only scatter more, and the tests hold all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, stdev, variance
from typing import ClassVar, Literal

from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.judge.store import Document, same_settings
from pytest_llmperf.records.result import CurveWord, JudgedCurve, JudgedPart
from pytest_llmperf.support import codec

# Parts: the losses of a training as a few means, each over as many steps as all before it.

#: So that no part is empty.
FEWEST_STEPS = 16
_PARTS = 4


@dataclass(frozen=True)
class Span:
    """Steps, counted from 1."""

    first: int
    last: int


def spans(steps: int) -> tuple[Span, ...]:
    """Those of a training of so many steps: ``2 to 12, 13 to 25, 26 to 50, 51 to 100``; ValueError: there are fewer
    than ``FEWEST_STEPS``."""
    if steps < FEWEST_STEPS:
        raise ValueError(f"{steps} steps, expected {FEWEST_STEPS} or more")
    ends = [1, *(steps >> shift for shift in reversed(range(_PARTS)))]
    return tuple(Span(before + 1, end) for before, end in pairwise(ends))


def parts_of(losses: Sequence[float]) -> tuple[float, ...]:
    """The mean loss of each span, in nats a token."""
    return tuple(fmean(losses[span.first - 1 : span.last]) for span in spans(len(losses)))


# Spread: how far apart trainings of other seeds are in each part, and what difference beside that is none.

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
class _Look:
    """How far a part's trainings are from what is stored, and how well that is known."""

    difference: float
    error: float
    df: float
    level: float
    """Of false alarms, in one direction."""


def judge_curve(trained: Mapping[int, Sequence[float]], stored: Mapping[int, Sequence[float]]) -> JudgedCurve:
    """The losses of the seeds that were ``trained``, the first of the ``stored`` ones, each as many. One seed tells
    that all is as it was. Where it does not, the next ones have to be trained: ``undecided``, until all that are stored
    were, or two show a fault that no seed would."""
    seeds = tuple(trained)
    everything = spreads(list(stored.values()))
    parts, looks = [], []
    both = (zip(*(parts_of(side[seed]) for seed in seeds), strict=True) for side in (trained, stored))
    for span, spread, now, then in zip(spans(len(stored[seeds[0]])), everything, *both, strict=True):
        look = _look(now, then, spread, len(stored), tests=2 * len(everything))  # one in each direction
        looks.append(look)
        parts.append(
            JudgedPart(
                first=span.first,
                last=span.last,
                loss=fmean(now),
                # Two are held against the mean of all, so that is what they stand beside.
                stored=fmean(now) - look.difference if look else fmean(then),
                nothing=spread.nothing,
                # The least difference that is told from nothing.
                seen=spread.nothing + look.error * quantile(1 - look.level, look.df) if look else None,
            )
        )
    word, reason = _decided(trained, stored, everything, looks, parts)
    return JudgedCurve(verdict=word, reason=reason, seeds=seeds, stored_seeds=len(stored), parts=tuple(parts))


def _decided(
    trained: Mapping[int, Sequence[float]],
    stored: Mapping[int, Sequence[float]],
    everything: Sequence[SeedSpread],
    looks: Sequence[_Look | None],
    parts: Sequence[JudgedPart],
) -> tuple[CurveWord, str]:
    of_seeds = f"{len(trained)} of {len(stored)} seeds"
    pairs = ((now, then) for seed, losses in trained.items() for now, then in zip(losses, stored[seed], strict=True))
    if all(abs(now - then) <= _LAST_DIGIT * abs(then) for now, then in pairs):
        return "same", f"the same to the last digit ({of_seeds})"
    furthest = max(parts, key=lambda part: abs(part.difference) / part.nothing)
    if len(trained) == 1:
        is_near = all(abs(part.difference) <= part.nothing for part in parts)
        return ("same" if is_near else "undecided"), _beside(furthest, of_seeds)
    told = [part for part in parts if part.seen is not None and abs(part.difference) > part.seen]
    if told:
        worst = max(told, key=lambda part: abs(part.difference) / (part.seen or math.inf))
        word: CurveWord = "worse" if worst.difference > 0 else "faster"
        return word, f"{_beside(worst, of_seeds)}: {_HOW[word]}"
    if len(trained) < len(stored):
        return "undecided", _beside(furthest, of_seeds)
    # Whether each difference is none, and cannot well be as much as another seed's.
    if all(
        look
        and abs(look.difference) <= spread.nothing
        and abs(look.difference) + look.error * quantile(_CONFIDENCE, look.df) <= spread.sd
        for spread, look in zip(everything, looks, strict=True)
    ):
        return "same", _beside(furthest, of_seeds)
    least = (furthest.seen or 0.0) / furthest.stored
    return "undecided", f"{_beside(furthest, of_seeds)}, only {least:.2%} or more would have been told"


def _look(
    now: Sequence[float], then: Sequence[float], spread: SeedSpread, num_stored: int, *, tests: int
) -> _Look | None:
    """Two of the seeds are held against all that are stored, all of them in pairs; between there is no test."""
    num = len(now)
    if num == num_stored:
        share = 1 - _EARLY_SHARE if num > _EARLY_SEEDS else 1.0
        differences = [mine - theirs for mine, theirs in zip(now, then, strict=True)]
        return _Look(fmean(differences), stdev(differences) / math.sqrt(num), num - 1, ALARMS * share / tests)
    if num != _EARLY_SEEDS:
        return None
    # Of equal variance: so few of the one side have none of their own worth knowing.
    df = num + num_stored - 2
    pooled = (variance(now) * (num - 1) + spread.sd**2 * (num_stored - 1)) / df
    error = math.sqrt(pooled * (1 / num + 1 / num_stored))
    return _Look(fmean(now) - spread.mean, error, df, ALARMS * _EARLY_SHARE / tests)


def _beside(part: JudgedPart, of_seeds: str) -> str:
    """``loss of steps 51 to 100 is 5.672, 5.613 is stored: +1.05 %, up to 0.19 % is nothing (5 of 5 seeds)``."""
    share = part.difference / part.stored
    nothing = part.nothing / part.stored
    return (
        f"loss of steps {part.first} to {part.last} is {part.loss:.4f}, {part.stored:.4f} is stored: {share:+.2%}, "
        f"up to {nothing:.2%} is nothing ({of_seeds})"
    )


# CurveBaseline: the losses of several seeds of one spec, and who accepted them when.

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
class CurveBaseline(Document):
    """What the loss curve of a spec is held against."""

    recorded_at: str
    """UTC, ISO 8601."""
    curves: tuple[SeedCurve, ...]
    """The spec's own seed first."""
    machine: Literal["loss-curves"] = LOSS_CURVES
    reason: str = ""
    revision: str = ""
    """Commit of the tree that trained; empty where there is none."""
    device: str = ""
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
