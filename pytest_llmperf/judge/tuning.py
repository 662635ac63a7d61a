"""Which trial to make next: coordinate ascent, by gain a second.

A step changes one choice, or two that did well alone. What a choice brought beside others is believed beside these."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations, takewhile
from statistics import median
from typing import Any

from pytest_llmperf.judge.objective import CLOSE

#: How much a trial compiles: only Triton's kernels; layers, each alike; a whole model; or these, with tilings timed.
PLAIN, COMPILED, WHOLE, AUTOTUNED = range(4)

# So many standard errors, and configurations as close are told apart by turns too.
_DEVIATIONS = 2.0

# Seconds of a trial outside of its steps, before any is known.
_FIRST = (3.0, 15.0, 45.0, 120.0)
# Of the time left, what a search begins with in any case takes the so-manieth part at most.
_BEGINNING = 6
# A gain, as a logarithm, of a micro-batch beside the best one, and from where on a step is worth its seconds; a choice
# that failed so often is given up, what is so much slower by its smaller micro-batch alone is not tried, and a recipe
# is tried again with a micro-batch of more than so many times the one it had.
_NEAR, _WORTH, _GIVEN_UP, _FAR_SLOWER, _LARGER = 0.006, 0.003, 2, 0.7, 2


@dataclass(frozen=True)
class Beliefs:
    """What is expected before it is known. As logarithms: the gain of a choice that nobody has tried, and by how much
    one may do better than it did ``elsewhere``; the share that counts of what a choice brings beside a plain one; how
    many sequences of a step take as long as what does not grow with them; by how much beliefs go ``astray``; and the
    gain of a ``recipe`` that is not begun with."""

    untried: float = 0.1
    elsewhere: float = 0.03
    beside_plain: float = 0.5
    fixed: float = 4.0
    astray: float = 0.05
    recipe: float = 0.2


Choices = Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What a trial of one configuration said: the logarithm of its cost, or none where it failed."""

    log: float | None
    step_seconds: float = 0.0
    outside_seconds: float | None = None
    """What it took beside its steps, where it was made now."""
    error: float = 0.0
    """How much ``log`` would scatter from launch to launch."""
    is_spoilt: bool = False
    """Whether what was around it may have made it what it is: its figure ranks nowhere, and may be made anew once."""


@dataclass(frozen=True)
class Field:
    """The configurations that are searched, by their numbers: sequences of one length."""

    choices: Sequence[Choices]
    """By axis."""
    size_axis: str
    """The axis of the micro-batch; empty where there is none."""
    sizes: Sequence[int]
    tokens: Sequence[int]
    """Of a step, of all ranks."""
    compiles: Sequence[int]
    """How much: ``PLAIN`` and above."""
    wastes: Sequence[float]
    """By how much more each costs for what only spares memory, as a logarithm: recomputation, say."""
    scales: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Axes along which a step goes to the next choice, and no further, with their choices in order."""
    beginnings: Sequence[Sequence[int]] = ()
    """Of each that is to be tried after the first of all, whatever else is known, what would do, the best first."""

    def __add__(self, more: Field) -> Field:
        """More configurations of the same axes."""
        names = ("choices", "sizes", "tokens", "compiles", "wastes")
        rows: dict[str, Any] = {name: [*getattr(self, name), *getattr(more, name)] for name in names}
        return replace(self, **rows)


class Search:
    """Over a field, by trials of so many ``steps``; where it begins is the first of it."""

    def __init__(self, field: Field, steps: int, beliefs: Beliefs = Beliefs()) -> None:
        self._num_steps, self._beliefs, self._field = steps, beliefs, replace(field, choices=())
        self.over(field)
        self._outside: tuple[list[float], ...] = ([], [], [], [])
        self.outcomes: dict[int, Outcome] = {}
        self.excluded, self.refused = set[int](), set[int]()
        """What needs no trial, as it cannot fit; and what was refused, whatever it takes."""
        self._done: set[int] = set()
        self._begun: list[tuple[int, int]] = []
        """The places of those of the field's beginnings that were tried, and what was."""
        self._failures: Counter[tuple[str, str]] = Counter()

    def over(self, field: Field) -> None:
        """Go on in a field that has more configurations, behind those that there were."""
        before, self._field = self._field.choices, field
        if field.choices is not before:
            self._numbers = {tuple(sorted(one.items())): number for number, one in enumerate(field.choices)}
            self._all = list(dict.fromkeys(choice for one in field.choices for choice in one.items()))

    def tell(self, number: int, outcome: Outcome) -> None:
        choices, best = self._field.choices[number].items(), next(iter(self.in_order()), None)
        wanted = enumerate(map(self._wanted, range(len(self._field.beginnings))))
        self._begun += [(at, number) for at, n in wanted if n is not None and self._shape(n) == self._shape(number)]
        self._done |= {number} if number in self.outcomes or not outcome.is_spoilt else set()
        self.outcomes[number] = outcome
        if outcome.is_spoilt:
            return
        if outcome.log is not None:  # whatever it has is not to blame
            for choice in choices:
                self._failures.pop(choice, None)
            if outcome.outside_seconds is not None:
                self._outside[self._field.compiles[number]].append(outcome.outside_seconds)
        elif best is not None:  # else the host may be to blame
            new = choices - self._field.choices[best].items()
            self._failures.update(one for one in new if one[0] != self._field.size_axis)

    @property
    def left(self) -> list[int]:
        """Those that were neither tried nor excluded; what was spoilt may be tried again once."""
        return [number for number in range(len(self._field.choices)) if self._is_left(number)]

    def _is_left(self, number: int) -> bool:
        return not any(number in each for each in (self._done, self.excluded, self.refused))

    def as_large(self, number: int) -> list[int]:
        """It, and those that differ from it by a larger micro-batch alone."""
        sizes, shape = self._field.sizes, self._shape(number)
        return [n for n, size in enumerate(sizes) if size >= sizes[number] and self._shape(n) == shape]

    def in_order(self) -> list[int]:
        """The best of those measured first, and where all were spoilt, of these."""
        logs = self._logs()
        return sorted(logs, key=lambda number: logs[number])

    def close_to_best(self) -> list[int]:
        """The best first, and those measured that are as close to it as ``CLOSE``, or as the trials of both scatter."""
        logs, order = self._logs(), self.in_order()
        errors = {number: self.outcomes[number].error for number in order}
        within = {number: max(CLOSE, _DEVIATIONS * math.hypot(errors[order[0]], errors[number])) for number in order}
        return [number for number in order if logs[number] - logs[order[0]] <= within[number]]

    def outside(self, compiles: int) -> float:
        """What a trial is expected to take beside its steps, by the others; seconds."""
        for kind in range(compiles, -1, -1):
            if self._outside[kind]:
                return median([_FIRST[kind], *self._outside[kind]]) + _FIRST[compiles] - _FIRST[kind]
        return _FIRST[compiles]

    def promising(self, within: Callable[[int], float]) -> Iterator[int]:
        """What to try next, and then: steps that promise a gain, and what may be one afar. ``within``: the seconds that
        a trial may take that compiles so much."""
        field, logs = self._field, self._logs()
        if not logs and self._is_left(0):
            yield 0
        begun = [n for at in range(len(field.beginnings)) if (n := self._begun_by(at)) is not None]
        seconds = max(0.0, within(PLAIN))
        yield from (n for n in begun if _BEGINNING * self.outside(field.compiles[n]) <= seconds or not logs)
        if not logs:
            failed = [self._shape(number) for number in self.outcomes]  # as it would with another micro-batch
            order = sorted((number for number in self.left if number), key=self._far)
            yield from sorted(order, key=lambda number: self._shape(number) in failed)
            return
        best, again = self.in_order()[0], dict.fromkeys(filter(self._is_left, self.outcomes), self._beliefs.untried)
        each = self._num_steps * self.outcomes[best].step_seconds / field.tokens[best]
        near, by_size = self._gains(best) | again, self._by_size(best)
        near |= {number: max(near.get(number, 0.0), self._beliefs.recipe + by_size(number)) for number in begun}
        steps = {number: gain for number, gain in near.items() if gain >= _WORTH}
        for gains in (steps, self._gains_afar(best)):
            costs = {number: self.outside(field.compiles[number]) + each * field.tokens[number] for number in gains}
            most = {kind: max(0.0, within(kind)) for kind in {field.compiles[number] for number in gains}}
            left = {number: most[field.compiles[number]] - cost for number, cost in costs.items()}
            able = sorted((one for one in gains if left[one] >= 0), key=lambda one: -gains[one] / costs[one])
            # What brings more, and would have no time left behind the first, is not put off.
            due = [n for n in begun if n in able and gains[n] > gains[able[0]] and left[n] < costs[able[0]]]
            yield from dict.fromkeys([*due, *able])

    def _begun_by(self, at: int) -> int | None:
        """The best of a recipe that nobody tried with near as large a micro-batch, and sparing no more memory."""
        wanted, sizes, wastes = self._wanted(at), self._field.sizes, self._field.wastes
        begun = [number for place, number in self._begun if place == at]
        if wanted is None or any(sizes[wanted] <= _LARGER * sizes[n] and wastes[wanted] >= wastes[n] for n in begun):
            return None
        return wanted

    def _wanted(self, at: int) -> int | None:
        """The best of a recipe, of which better is not known and that has no choice that failed."""
        choices, tried = self._field.choices, self._logs()
        better = takewhile(lambda n: n not in tried, self._field.beginnings[at])
        sound = (n for n in better if self._is_left(n) and self._failures.keys().isdisjoint(choices[n].items()))
        return next(sound, None)

    def _by_size(self, best: int) -> Callable[[int], float]:
        """Of a number what its micro-batch brings in the place of the one of ``best``."""
        sizes, fixed = self._field.sizes, 2 * self._field.sizes[best] * max(0.0, self._doubling(best))
        return lambda number: math.log((1 + fixed / sizes[best]) / (1 + fixed / sizes[number]))

    def _far(self, number: int) -> tuple[float, ...]:
        """How far from the first of all, while nothing trains."""
        field, first = self._field, self._field.choices[0]
        others = sum(first.get(name) != choice for name, choice in self._shape(number).items())
        return field.compiles[number], others, abs(math.log2(field.sizes[number] / field.sizes[0])), number

    def _gains(self, best: int) -> dict[int, float]:
        """What each step from ``best`` may bring, as far as others tell."""
        own, each, found = self._field.choices[best], self._choice_gains(best), dict[int, float]()

        def step(gain: float, *changes: tuple[str, str], at: int = best) -> bool:
            number = self._beside(self._field.choices[at], *changes)
            if number is not None and self._is_left(number):
                extra = self._field.wastes[number] - self._field.wastes[at]
                found[number] = max(found.get(number, -math.inf), gain - max(0.0, extra))
            return number is not None

        for size, gain in self._size_gains(best).items():
            is_excluded = step(gain, size) and self._beside(own, size) in self.excluded
            for choice, (more, is_known) in each.items():  # what takes less memory may make room for it
                room = gain + min(more, self._beliefs.elsewhere) if is_excluded and gain > _NEAR else 0.0
                unspared = 0.0 if is_known else self._unspared(best, self._beside(own, choice, size))
                step(max(room, unspared), choice, size)
        plain = next((n for n in self.in_order() if self._field.compiles[n] == PLAIN), best)
        for choice, (gain, is_known) in each.items():  # what it does beside that one, for a few seconds, it may do here
            if not is_known and plain != best and self._field.choices[plain].get(choice[0]) == own.get(choice[0]):
                step(gain * self._beliefs.beside_plain, choice, at=plain)
        exists = {choice: step(gain, choice) for choice, (gain, _) in each.items()}
        for (one, (gain, is_known)), (other, (more, is_too)) in combinations(each.items(), 2):
            if one[0] != other[0] and ((is_known and is_too) or not (exists[one] and exists[other])):
                step(min(gain + more - self._beliefs.elsewhere, self._beliefs.untried), one, other)
        return found

    def _unspared(self, best: int, number: int | None) -> float:
        """What it brings that another one spares no memory, with fewer sequences maybe; 0 where it spares as much."""
        saved = 0.0 if number is None else self._field.wastes[best] - self._field.wastes[number]
        return saved + self._by_size(best)(number) if number is not None and saved > 0 else 0.0

    def _gains_afar(self, best: int) -> dict[int, float]:
        """What any other may bring, as beliefs err, by all that it has in the place of what ``best`` has: but for what
        was given up, spares memory that as many sequences had without, or is far slower by its micro-batch alone."""
        field, logs, each, err, found = self._field, self._logs(), self._choice_gains(best), self._beliefs.astray, {}
        own, sizes, of_size = field.choices[best], field.sizes, self._by_size(best)
        for number in self.left:
            changes = [one for one in field.choices[number].items() - own.items() if one[0] != field.size_axis]
            by_size = of_size(number)
            is_needless = any(sizes[number] <= sizes[one] and field.wastes[number] > field.wastes[one] for one in logs)
            if by_size < -_FAR_SLOWER or is_needless or any(one not in each for one in changes):
                continue
            gain = sum(each[one][0] for one in changes) - self._beliefs.elsewhere * max(0, len(changes) - 1)
            gain += by_size - max(0.0, field.wastes[number] - field.wastes[best])
            found[number] = err * math.log1p(math.exp(gain / err))
        return found

    def _choice_gains(self, best: int) -> dict[tuple[str, str], tuple[float, bool]]:
        """Of each choice that ``best`` has not made what it may bring, and whether it was tried in this one's place."""
        own, known, found = self._field.choices[best], self._effects(best), dict[tuple[str, str], tuple[float, bool]]()
        trained = {one for number in self._logs() for one in self._field.choices[number].items()}
        tried = Counter(name for name, _ in trained)
        behind = (n for one in self._field.beginnings if best in one for n in one[one.index(best) :])
        lesser = {one for n in behind for one in self._field.choices[n].items()}  # to a recipe that it follows
        for name, choice in self._all:
            if own.get(name) == choice or name == self._field.size_axis or self._failures[name, choice] >= _GIVEN_UP:
                continue
            scale = self._field.scales.get(name, ())
            if scale and abs(scale.index(choice) - scale.index(own[name])) > 1:
                continue
            # Of an axis of which more was tried less is to be expected.
            untried = self._beliefs.untried / max(1, tried[name] + ((name, choice) in trained))
            gain = known.get((name, choice), 0.0 if (name, choice) in lesser else untried)
            found[name, choice] = gain / (1 + 2 * self._failures[name, choice]), (name, choice) in known
        return found

    def _effects(self, best: int) -> dict[tuple[str, str], float]:
        """What a choice may bring in the place of the one of ``best``, by what it did where all else was alike, at the
        nearest micro-batch: the further that is, the more it may do better here."""
        logs, field, found = self._logs(), self._field, dict[tuple[str, str], tuple[float, float]]()
        for one, other in permutations(logs, 2):
            before, after = field.choices[one].items(), field.choices[other].items()
            changed, kept = [*(after - before)], [*(before - after)]
            if len(changed) == len(kept) == 1 and kept[0] in field.choices[best].items():
                far = abs(math.log2(field.sizes[one] / field.sizes[best]))
                gain = self._beliefs.elsewhere * (1 + far) + logs[one] - logs[other]
                found[changed[0]] = min(found.get(changed[0], (math.inf, 0.0)), (far, gain), key=lambda it: it[0])
        return {choice: gain for choice, (_, gain) in found.items()}

    def _size_gains(self, best: int) -> dict[tuple[str, str], float]:
        """Of micro-batches beside the one of ``best`` what they may bring, by their choice: of the next ones little, of
        up to four times as large ones, while no larger one is tried, what doubling may, and once more half of that."""
        axis, sizes, shape = self._field.size_axis, self._field.sizes, self._shape(best)
        if not axis:
            return {}
        own, beside = sizes[best], (number for number in range(len(sizes)) if self._shape(number) == shape)
        names = {sizes[number]: self._field.choices[number][axis] for number in beside}
        tried = {sizes[number] for number in self._logs() if self._shape(number) == shape}
        above, below = sorted(size for size in names if size > own), sorted(size for size in names if size < own)
        doubling = self._doubling(best) if tried.isdisjoint(above) else 0.0
        near = {*above[:1], *below[-1:], *(size for size in above if doubling and size <= 4 * own)} - tried
        return {(axis, names[size]): _NEAR + 2 * doubling * (1 - own / max(own, size)) for size in sorted(near)}

    def _doubling(self, best: int) -> float:
        """What twice the micro-batch of ``best`` may bring, by what the last doubling of any shape did."""
        logs, sizes, found = self._logs(), self._field.sizes, list[float]()
        for one, other in combinations(sorted(logs, key=lambda number: sizes[number]), 2):
            if sizes[one] < sizes[other] <= sizes[best] and self._shape(one) == self._shape(other):
                brought = (logs[one] - logs[other]) / math.log2(sizes[other] / sizes[one])
                found.append(brought * sizes[other] / sizes[best] / 2)
        fixed = self._beliefs.fixed / sizes[best]
        return max(found, default=math.log((1 + fixed) / (1 + fixed / 2)))

    def _shape(self, number: int) -> Choices:
        """Its choices but for the micro-batch."""
        return {name: one for name, one in self._field.choices[number].items() if name != self._field.size_axis}

    def _beside(self, own: Choices, *changes: tuple[str, str]) -> int | None:
        """The number of ``own`` with other choices."""
        return self._numbers.get(tuple(sorted({**own, **dict(changes)}.items())))

    def _logs(self) -> dict[int, float]:
        """Of those that were not spoilt; where there is none, of the others."""
        logs = {number: one.log for number, one in self.outcomes.items() if one.log is not None}
        return {number: log for number, log in logs.items() if not self.outcomes[number].is_spoilt} or logs
