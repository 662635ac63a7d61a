"""Search: which configuration to try next, and when no other is worth its seconds.

Expected improvement (Jones, Schonlau and Welch 1998) for a second of trial, times the chance that it trains at all,
and in time.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

from pytest_llmperf.judge.tuning_surrogate import Prediction, Surrogate
from pytest_llmperf.support.interpreter import np, special

# What has failed once, and never trained, trains one time in three; what has failed twice one time in five.
_WEIGHT = 2.0

_Pair = frozenset[tuple[str, str]]
_Traits = Mapping[str, Any]


class Failures:
    """How likely a configuration trains, by what failed and what trained before it.

    A single trait may be what fails, or two together, as Liger's kernels and a compiler do.
    """

    def __init__(self) -> None:
        self._failed: Counter[_Pair] = Counter()
        self._trained: set[_Pair] = set()

    def note(self, traits: _Traits, *, trained: bool) -> None:
        """One with these traits trained, or failed."""
        (self._trained if trained else self._failed).update(_pairs(traits))

    def chance(self, traits: _Traits) -> float:
        """That one with these traits trains."""
        if not self._failed:
            return 1.0
        worst = max((self._failed[pair] for pair in _pairs(traits) if pair not in self._trained), default=0)
        return 1 / (1 + _WEIGHT * worst)


def _pairs(traits: _Traits) -> list[_Pair]:
    words = [(name, str(value)) for name, value in traits.items()]
    return [frozenset(pair) for pair in (*combinations(words, 2), *((word,) for word in words))]


class Timeouts:
    """Which choices of what ran out of its time may be to blame, and so how likely others run out of theirs.

    To blame may be each choice that nothing has had that came to its end, all alike: a compiler that is new to this
    host, or a kernel that hangs. Before anything came to its end the host itself may be to blame, and no choice is.
    """

    def __init__(self, size: str) -> None:
        """``size`` is the trait that is a number, and no choice of those: what steps of it take is known."""
        self._size = size
        self._in_time: set[tuple[str, str]] = set()
        self._late: dict[int, tuple[_Traits, float]] = {}
        self.blamed: dict[int, _Traits] = {}
        """Of each that ran out of its time, by its number, the choices that may be to blame, where there are any."""

    def in_time(self, traits: _Traits) -> None:
        """One with these traits came to its end."""
        self._in_time.update((name, str(value)) for name, value in traits.items())
        self._blame()

    def ran_out(self, number: int, traits: _Traits, seconds: float) -> None:
        """One with these traits was ended after so many."""
        if self._in_time:
            self._late[number] = traits, seconds
            self._blame()

    @property
    def seconds(self) -> float:
        """What one more is expected to take; 0 before the first."""
        return fmean(seconds for _, seconds in self._late.values()) if self._late else 0.0

    def risk(self, traits: _Traits) -> float:
        """That one with these traits runs out of its time too: the share of what may be to blame that it has."""
        return max((self._share(blamed, traits) for blamed in self.blamed.values()), default=0.0)

    def like(self, traits: _Traits) -> Sequence[int]:
        """Those of which it has all that may be to blame."""
        return [number for number, blamed in self.blamed.items() if self._share(blamed, traits) == 1.0]

    def _share(self, blamed: _Traits, traits: _Traits) -> float:
        shared = [name for name, value in blamed.items() if traits[name] == value]
        return len(shared) / len(blamed)

    def _blame(self) -> None:
        self.blamed = {}
        for number, (traits, _) in self._late.items():
            choices = {name: value for name, value in traits.items() if name != self._size}
            blamed = {name: value for name, value in choices.items() if (name, str(value)) not in self._in_time}
            self.blamed |= {number: blamed} if blamed else {}


#: How much a trial compiles: nothing, but for Triton's kernels; layers or a model; or these, and each kernel's tilings
#: are measured.
PLAIN, COMPILED, AUTOTUNED = range(3)

# Before anything is known: what a trial takes outside of its steps, and how many times that of the one before; seconds.
_FIRST = 3.0
_MORE: Mapping[int, float] = {COMPILED: 5.0, AUTOTUNED: 8.0}


class TrialCosts:
    """What a trial of a configuration will take, by what those before it took."""

    def __init__(self) -> None:
        self._outside: dict[int, list[float]] = {PLAIN: [], COMPILED: [], AUTOTUNED: []}

    def learn(self, *, compiles: int, outside_seconds: float) -> None:
        """What a trial took beside its steps."""
        self._outside[compiles].append(outside_seconds)

    def outside(self, *, compiles: int) -> float:
        """What a trial is expected to take beside its steps; seconds."""
        if self._outside[compiles]:
            return median(self._outside[compiles])
        return _FIRST if compiles == PLAIN else self.outside(compiles=compiles - 1) * _MORE[compiles]


#: Configurations closer than this, as a fraction, are told apart by turns and not by trials.
CLOSE = 0.015

# Before the first prediction: so many are tried as they come, the first of them what the search begins at.
_BLIND = 4
# By chance: so many, of which a prior puts the most promising first.
_CHOSEN = 32
# Of the time left, what a search is told to begin with takes the so-manieth part at most.
_BEGINNING = 6
# Times as many as the first has.
_MANY_TOKENS = 4
# From here on a trial is worth its cost: the improvement to expect from it, as a fraction.
_WORTH = 5e-5
# Of the most promising, so many are looked at more closely.
_PROMISING = 400
# How far off a trial may be that was spoilt, as a logarithm: a neighbour takes a part of the hardware.
_SPOILT = 0.3
# What is like so many that ran out of their time is not tried any more.
_GIVEN_UP = 2
# That are drawn for a chance: it is known to a per cent or two.
_WORLDS = 500


@dataclass(frozen=True)
class Outcome:
    """What a trial of one configuration said: the logarithm of its cost, or none where it failed."""

    log: float | None
    error: float = 0.0
    ran_out_seconds: float = 0.0
    """After which it was ended; 0 where it came to an end by itself."""
    is_spoilt: bool = False
    """Whether what was around it may have made it what it is: its figure ranks nowhere, and may be made anew once."""


@dataclass(frozen=True)
class Field:
    """The configurations that are searched, by their numbers: sequences of one length."""

    traits: Sequence[Mapping[str, Any]]
    size: str
    """The trait that is a number."""
    tokens: Sequence[int]
    """Of a step, of all ranks."""
    compiles: Sequence[int]
    """How much, as ``TrialCosts`` has it."""
    prior: Sequence[float] | None = None
    """Logarithms of what each costs as far as that can be counted, up to a constant."""
    beginnings: Sequence[Sequence[int]] = ()
    """Of each that is to be tried after the first of all, whatever else is known, what would do, the best first."""


class Search:
    """Over a field; where it begins is the first of it."""

    def __init__(self, field: Field, steps: int, seed: int = 0) -> None:
        """``steps`` of a trial."""
        self._field = field
        self._surrogate = Surrogate(field.traits, field.size, field.prior)
        self._chance = random.Random(seed)  # noqa: S311 - an order, no secret
        self._failures, self.timeouts = Failures(), Timeouts(field.size)
        self.costs, self._num_steps = TrialCosts(), steps
        self.outcomes: dict[int, Outcome] = {}
        self.excluded: set[int] = set()
        """What needs no trial: it cannot fit, say."""
        self._again: set[int] = set()
        """What was spoilt once, and is not left out for that."""

    def tell(self, number: int, outcome: Outcome) -> None:
        """A trial was made."""
        is_first = number not in self.outcomes
        self.outcomes[number] = outcome
        traits = self._field.traits[number]
        self._again.discard(number)
        if outcome.is_spoilt and is_first:
            self._again.add(number)
        if outcome.is_spoilt and outcome.log is None:  # a failure that is others' says nothing of its traits
            return
        self._failures.note(traits, trained=outcome.log is not None)
        if outcome.log is not None:
            self.timeouts.in_time(traits)
        elif outcome.ran_out_seconds:
            self.timeouts.ran_out(number, traits, outcome.ran_out_seconds)

    @property
    def left(self) -> list[int]:
        """Those that were neither tried nor excluded; what was spoilt may be tried again once."""
        done = (self.outcomes.keys() - self._again) | self.excluded
        return [number for number in range(len(self._field.traits)) if number not in done]

    def put_off(self) -> Counter[int]:
        """Of those left, how many have all of what may have made another run out of its time; by that one's number."""
        return Counter(other for number in self.left for other in self.timeouts.like(self._field.traits[number])[:1])

    def in_order(self) -> list[int]:
        """The best of those measured first, and where all were spoilt, of these."""
        logs = self._ranked()
        return sorted(logs, key=lambda number: logs[number])

    def close_to_best(self) -> list[int]:
        """The best first, and those measured that are within ``CLOSE`` of it."""
        logs, order = self._ranked(), self.in_order()
        return [number for number in order if logs[number] - logs[order[0]] <= CLOSE]

    def promising(self, seconds: float) -> Iterator[int]:
        """What to try next with so many seconds left, and after that what else, if nothing new were known.

        Nothing where no trial is worth its cost.
        """
        left = [n for n in self.left if len(self.timeouts.like(self._field.traits[n])) < _GIVEN_UP]
        if len(self._logs()) < _BLIND:
            yield from self._blind(left, seconds)
        elif left:
            yield from self._worth_it(left, seconds)

    def _worth_it(self, left: Sequence[int], seconds: float) -> Iterator[int]:
        """Of ``left`` what is worth its cost, the most first; what is like one that ran out of its time comes last."""
        prediction, numbers = self.prediction(), np.array(left)
        mean, sd = prediction.mean[numbers], prediction.sd[numbers]
        worth = _expected_improvement(min(self._ranked().values()), mean, sd)
        steps = np.exp(np.clip(mean, -60, 60)) * np.array(self._field.tokens)[numbers]
        compiles = np.array(self._field.compiles)[numbers]
        outside = np.array([self.costs.outside(compiles=kind) for kind in (PLAIN, COMPILED, AUTOTUNED)])
        risk = np.array([self.timeouts.risk(self._field.traits[number]) for number in left])
        cost = outside[compiles] + self._num_steps * steps + risk * self.timeouts.seconds
        worth = np.where((worth >= _WORTH) & (cost <= seconds), worth, 0.0)
        for in_time in (1 - risk, risk == 1.0):
            rate = worth * in_time / cost
            best = [int(place) for place in np.argsort(-rate)[:_PROMISING] if rate[place] > 0]
            chances = {place: self._failures.chance(self._field.traits[left[place]]) for place in best}
            for place in sorted(best, key=lambda place: -rate[place] * chances[place]):
                if worth[place] * in_time[place] * chances[place] >= _WORTH:
                    yield left[place]

    def prediction(self) -> Prediction:
        """Of the cost of each, by what was measured."""
        return self._surrogate.predict(*self._seen())

    def _seen(self) -> tuple[list[int], list[float], list[float]]:
        """What says something of all others, its logarithms and errors; what was spoilt only while there are few."""
        logs = self._ranked()
        logs = logs if len(logs) >= _BLIND else self._logs()
        outcomes = [self.outcomes[number] for number in logs]
        errors = [max(one.error, _SPOILT) if one.is_spoilt else one.error for one in outcomes]
        return list(logs), list(logs.values()), errors

    def chance_of_better(self, by: float) -> float:
        """How likely one of those left is better than the best measured by more than the fraction ``by``.

        The share of worlds that agree with all trials and have one, each counted as far as it is likely to train.
        """
        left, seen = self.left, self._seen()
        if not left or not seen[0]:
            return 1.0 if left else 0.0
        prediction, numbers = self.prediction(), np.array(left)
        wanted = min(self._ranked().values()) + math.log1p(-by)
        far = (prediction.mean[numbers] - wanted) / prediction.sd[numbers]
        near = [left[int(place)] for place in np.argsort(far)[:_PROMISING]]
        worlds = self._surrogate.draws(*seen, near, _WORLDS)
        trains = np.array([self._failures.chance(self._field.traits[number]) for number in near])
        return float(((worlds < wanted) * trains).max(axis=1).mean())

    def _blind(self, left: Sequence[int], seconds: float) -> Iterator[int]:
        """Where it begins, and what it is told to begin with; then what a prior promises most of, and others by chance,
        of which it promises more than of most.

        What compiles, and a step of many more tokens than the first has, takes too long to begin with, and comes last.
        What may run out of its time as another did does not come while there is something else.
        """
        risks = {number: self.timeouts.risk(self._field.traits[number]) for number in left}
        if 0 in left:
            yield 0
        for numbers in self._field.beginnings:
            is_cheap = _BEGINNING * self.costs.outside(compiles=self._field.compiles[numbers[0]]) <= seconds
            if is_cheap and self.outcomes.keys().isdisjoint(numbers):
                yield from [number for number in numbers if number in risks and not risks[number]][:1]
        field, most = self._field, _MANY_TOKENS * self._field.tokens[0]
        prior, plain = field.prior, [n for n in left if n]
        long = {n for n in plain if field.compiles[n] != PLAIN or field.tokens[n] > most}
        for alike in ([n for n in plain if n not in long], [n for n in plain if n in long]):
            least = min((risks[n] for n in alike), default=0.0)
            others = [n for n in alike if risks[n] == least]
            chosen = self._chance.sample(others, min(len(others), _CHOSEN))
            if prior is not None:
                chosen.sort(key=lambda number: prior[number])
                yield from [min(others, key=lambda number: prior[number])] if others else []
            yield from chosen

    def _logs(self) -> dict[int, float]:
        return {number: one.log for number, one in self.outcomes.items() if one.log is not None}

    def _ranked(self) -> dict[int, float]:
        """Of those that were not spoilt; where there is none, of the others."""
        logs = self._logs()
        sound = {number: log for number, log in logs.items() if not self.outcomes[number].is_spoilt}
        return sound or logs


def _expected_improvement(best: float, mean: Any, sd: Any) -> Any:
    """In logarithms, so as a fraction where it is small."""
    far = (best - mean) / sd
    return sd * (far * special.ndtr(far) + np.exp(-(far**2) / 2) / math.sqrt(2 * math.pi))
