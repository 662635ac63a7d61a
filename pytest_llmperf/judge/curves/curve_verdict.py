"""Verdict: whether a training still learns what it did, loss by loss, seed beside the same seed. Pure.

One-sided tests in both directions, as for MLPerf's reference convergence points, where also what converges faster than
the reference is refused. A seed's order of rows and its initial weights are in both trainings of a pair and cancel; if
they no longer do (another generator of random numbers), pairs only scatter more, and the tests hold all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance

from pytest_llmperf.judge.curves.loss_parts import Span, parts_of, spans
from pytest_llmperf.judge.curves.seed_spread import SeedSpread, spreads
from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.records.loss_curve import CurveWord, JudgedCurve, JudgedPart

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
