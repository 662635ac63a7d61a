"""Searches of configurations of which all is known, replayed in many orders and with the noise of trials.

``python -m tools.tuning_replay [--orders 100] [--beds grids,families]`` prints, for each way to search and each budget,
the mean share of the best that was found, the share that 95 of 100 orders reached, how many orders came within 1 %, and
launches. Beds are grids that were measured, which a search enters anywhere, and families of ``tuning_world``, which it
enters at its base. Launches cost what they did. ``--left-out`` searches each grid by the beliefs that do best on those
of all other models; ``--given-up`` ends trials early that cannot win, and says what that saves.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean

from pytest_llmperf.judge.objective import CLOSE
from pytest_llmperf.judge.tuning import Beliefs, Outcome, Search
from pytest_llmperf.run.tuning.trials import STEPS
from pytest_llmperf.run.tuning.tuner import TRIAL_LEAST, TRIAL_SHARE, begun_by, field_of
from pytest_llmperf.run.tuning.winner import RIVALS
from pytest_llmperf.settings.space import Space, read_axes
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from tools.tuning_grid import read
from tools.tuning_world import FAMILIES, Family, Known, World, space

# Standard deviations: of a trial of few steps, and of a pair of launches that took turns.
_TRIAL_SD, _TURN_SD = 0.006, 0.003
_WITHIN, _END_SHARE = 0.01, 0.2
_FINALISTS, _ROUNDS, _FULL_STEPS = 3, 2, 24
# A trial that is this much slower than the best before it, as a logarithm, ends after three timed steps.
_SLOWER, _THREE_TIMED = 0.05, 5
_DATA = Path(__file__).parents[1] / "docs" / "data"
_SPACES = _DATA / "grids"
#: By GPU and model, rows and axes.
GRIDS = {
    "H200 llama-3.2-1b": (_DATA / "h200-grid-llama-3.2-1b.jsonl", _DATA / "h200-grid.toml"),
    "H200 opt-1.3b": (_DATA / "h200-part-of-grid-opt-1.3b.jsonl", _DATA / "h200-grid-opt-1.3b.toml"),
} | {
    f"{path.stem[:4].upper()} {path.stem[5:]}": (path, _SPACES / f"{path.stem[5:]}.toml")
    for path in sorted(_SPACES.glob("*.jsonl"))
}
# What may be believed, by ``--left-out``.
BELIEFS = [Beliefs()] + [
    Beliefs(untried=untried, elsewhere=elsewhere, fixed=fixed, astray=astray)
    for untried in (0.06, 0.1, 0.15)
    for elsewhere in (0.015, 0.03)
    for fixed in (2.0, 4.0)
    for astray in (0.05, 0.2)
]
_CHOSEN_BY_ORDERS = 20


@dataclass(frozen=True)
class Bed:
    """Configurations with what is known of each; the search begins at the first."""

    space: Space
    specs: Sequence[TrainSpec]
    known: Sequence[Known]

    def log(self, number: int) -> float:
        """Of its seconds for a token; infinite where it fails."""
        if self.known[number].failure:
            return math.inf
        spec = self.specs[number]
        return math.log(self.known[number].step_seconds / (spec.sequences_per_step * spec.sequence_length))

    def shuffled(self, chance: random.Random, *, anywhere: bool) -> Bed:
        """In another order of its axes and its configurations; the search begins at the same one, or ``anywhere``."""
        order = list(range(len(self.specs)))
        rest = order if anywhere else order[1:]
        chance.shuffle(rest)
        order = rest if anywhere else [0, *rest]
        axes = tuple(chance.sample(self.space.axes, len(self.space.axes)))
        specs = [self.specs[n] for n in order]
        return Bed(Space(specs[0] if anywhere else self.space.base, axes), specs, [self.known[n] for n in order])


@cache
def grid(name: str) -> Bed:
    """One that was measured."""
    rows, axes = GRIDS[name]
    measured = read(rows)
    known = [
        Known(
            step_seconds=one.trial.step_seconds,
            # The first of a visit waited for imports, as a search does once; later rows say no start and have none.
            outside=one.trial.wall_seconds - one.trial.steps * one.trial.step_seconds - one.phases.get("start", 0.0),
            peak=0.0 if one.trial.wall_seconds else math.inf,  # what was predicted not to fit was not launched
            failure=one.trial.kind,
        )
        for one in measured
    ]
    return Bed(Space(measured[0].spec, read_axes(axes)), [one.spec for one in measured], known)


def world(family: Family, seed: int) -> Bed:
    """One draw of a family."""
    found, specs = space()
    return Bed(found, specs, World(family, seed).all(specs, found))


class Budget:
    """The seconds that a search has, and the noise of what it sees."""

    def __init__(self, bed: Bed, seconds: float, chance: random.Random, *, gives_up: bool = False) -> None:
        self.bed, self.left, self.chance = bed, seconds * (1 - _END_SHARE), chance
        self._most = max(TRIAL_LEAST, TRIAL_SHARE * seconds)
        self._kept, self._gives_up, self._best = seconds * _END_SHARE, gives_up, math.inf
        self.launched = 0
        self.saved = self.spent = 0.0

    def cost(self, number: int, steps: int = STEPS) -> float:
        """What a launch takes."""
        return self.bed.known[number].outside + steps * self.bed.known[number].step_seconds

    def trial(self, number: int, steps: int = STEPS) -> float | None:
        """The logarithm as it is seen; ``None`` where no time is left for it."""
        log, made = self.bed.log(number), steps
        if self._gives_up and self._best + _SLOWER < log < math.inf:
            made = _THREE_TIMED
        cost = min(self._most, self.cost(number, made))
        if cost > self.left:
            return None
        self.left, self.spent, self._best = self.left - cost, self.spent + cost, min(self._best, log)
        self.saved += self.cost(number, steps) - cost
        self.launched += 1
        if cost == self._most:
            return math.inf
        return log + self.chance.gauss(0, _TRIAL_SD * math.sqrt(STEPS / steps))

    def for_trials(self, close: Sequence[int]) -> float:
        """What trials may take so that ``close`` can take turns."""
        turns = sum(self.cost(number, _FULL_STEPS) for number in close[: 1 + RIVALS])
        return self.left - max(0.0, turns * (len(close) > 1) - self._kept)

    def final(self, seen: Mapping[int, float]) -> int:
        """The best of those that are close to the best, by rounds of turns as long as there is time for them."""
        order = sorted(seen, key=lambda number: seen[number])
        close = [number for number in order[: 1 + RIVALS] if seen[number] - seen[order[0]] <= CLOSE]
        cost = sum(self.cost(number, _FULL_STEPS) for number in close)
        rounds = min(_ROUNDS, int((self.left + self._kept) / cost))
        if rounds == 0 or len(close) == 1:
            return order[0]
        sd = _TURN_SD / math.sqrt(2 * rounds)
        return min(close, key=lambda number: self.bed.log(number) + self.chance.gauss(0, sd))


def by_ascent(bed: Bed, budget: Budget, beliefs: Beliefs = BELIEFS[0]) -> dict[int, float]:
    """As ``llmperf tune`` searches, which leaves proofs their time besides."""
    field, seen = field_of(bed.space, bed.specs), dict[int, float]()
    numbers = dict[Spec, int](zip(bed.specs, range(len(bed.specs)), strict=True))
    search, best = Search(field, STEPS, beliefs), -1
    while (number := next(search.promising(lambda _: budget.for_trials(search.close_to_best())), None)) is not None:
        known = bed.known[number]
        if not known.fits:
            search.excluded |= {*search.as_large(number)}
            continue
        log = budget.trial(number)
        if log is None:
            break
        if known.failure == "oom":
            search.excluded |= {*search.as_large(number)}
        elif log == math.inf:
            search.tell(number, Outcome(None))
        else:
            seen[number] = log
            search.tell(number, Outcome(log, known.step_seconds, known.outside))
            if (now := search.in_order()[0]) != best:
                best = now
                begun = begun_by(bed.space, numbers, bed.specs[best], wastes=field.wastes[best] > 0)
                search.over(replace(field, beginnings=begun))
    return seen


def by_chance(bed: Bed, budget: Budget) -> dict[int, float]:
    """One after the other, in a random order."""
    seen = _in_order(budget, [number for number, one in enumerate(bed.known) if one.fits])
    return {number: log for number, log in seen if log < math.inf}


def by_halving(bed: Bed, budget: Budget) -> dict[int, float]:
    """Successive halving (Karnin, Koren and Somekh 2013): all for few steps as far as a third of the time goes, the
    best quarter of them for twice as many, and again."""
    order, seen, steps, share = (
        [n for n, one in enumerate(bed.known) if one.fits],
        dict[int, float](),
        5,
        budget.left / 3,
    )
    while order:
        until, last = budget.left - share, dict[int, float]()
        for number in order:
            log = budget.trial(number, steps) if budget.left > until else None
            if log is None:
                break
            last[number] = log
        last = {number: log for number, log in last.items() if log < math.inf}
        seen |= last
        tried = sorted(last, key=lambda number: last[number])
        order, steps = (tried[: len(tried) // 4], 2 * steps) if len(tried) > _FINALISTS else ([], steps)
    return seen


def _in_order(budget: Budget, order: Sequence[int]) -> Iterator[tuple[int, float]]:
    for number in order:
        log = budget.trial(number)
        if log is None:
            return
        yield number, log


Way = Callable[[Bed, Budget], dict[int, float]]
WAYS: Mapping[str, Way] = {"ascent": by_ascent, "halving": by_halving, "chance": by_chance}


def gap(bed: Bed, way: Way, seconds: float, seed: int, *, anywhere: bool = True) -> tuple[float, int]:
    """How far what is found is from the best that fits, as a logarithm; and the number of launches."""
    chance = random.Random(seed)  # noqa: S311 - an order, no secret
    bed = bed.shuffled(chance, anywhere=anywhere)
    budget = Budget(bed, seconds, chance)
    return found(bed, budget, way(bed, budget))


def found(bed: Bed, budget: Budget, seen: Mapping[int, float]) -> tuple[float, int]:
    """The same of what was ``seen``."""
    best = min(bed.log(number) for number, one in enumerate(bed.known) if one.fits)
    return (bed.log(budget.final(seen)) - best if seen else math.inf), budget.launched


def told(gaps: Sequence[tuple[float, int]]) -> str:
    """A cell: the mean share of the best, what 95 of 100 orders reach, how many are within 1 %, and launches."""
    far = sorted(one for one, _ in gaps)
    reached = math.exp(-far[min(len(far) - 1, math.ceil(0.95 * len(far)) - 1)])
    within = fmean(one <= _WITHIN for one in far)
    mean, launches = fmean(math.exp(-one) for one in far), fmean(number for _, number in gaps)
    return f"{mean:.1%} ({reached:.1%}, {within:.0%}, {launches:.0f})".replace("%", " %")


@cache
def gaps(name: str, beliefs: Beliefs, seconds: float) -> Sequence[float]:
    """Of a grid's first orders."""
    way = partial(by_ascent, beliefs=beliefs)
    return [gap(grid(name), way, seconds, seed)[0] for seed in range(_CHOSEN_BY_ORDERS)]


def chosen_without(model: str, seconds: float) -> Beliefs:
    """What does best on the grids of all other models: the most orders within 1 %, and the least far from it."""
    others = [name for name in GRIDS if not name.endswith(f" {model}")]

    def told_by(beliefs: Beliefs) -> tuple[float, float]:
        far = [one for name in others for one in gaps(name, beliefs, seconds)]
        return fmean(one <= _WITHIN for one in far), -fmean(min(one, 1.0) for one in far)

    return max(BELIEFS, key=told_by)


def left_out(orders: Sequence[int], budgets: Sequence[float]) -> Iterator[str]:
    """A row for each grid, searched by what was chosen without its model."""
    yield (
        "| grid | configurations | untried, elsewhere, fixed, astray | "
        + " | ".join(f"{one:.0f} s" for one in budgets)
        + " |"
    )
    yield "|---|---:|---|" + "---:|" * len(budgets)
    for name in GRIDS:
        beliefs = chosen_without(name.split()[1], budgets[0])
        way = partial(by_ascent, beliefs=beliefs)
        cells = [told([gap(grid(name), way, seconds, seed) for seed in orders]) for seconds in budgets]
        words = f"{beliefs.untried:g}, {beliefs.elsewhere:g}, {beliefs.fixed:g}, {beliefs.astray:g}"
        yield f"| {name} | {len(grid(name).specs)} | {words} | " + " | ".join(cells) + " |"


def given_up(orders: Sequence[int], budgets: Sequence[float]) -> Iterator[str]:
    """A row for each grid: searches as they are, with trials that are given up, and the seconds that saves."""
    yield "| grid | seconds | as it is | given up | seconds of trials | saved |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name in GRIDS:
        for seconds in budgets:
            cells, spent, saved = [], 0.0, 0.0
            for gives_up in (False, True):
                gaps = []
                for seed in orders:
                    chance = random.Random(seed)  # noqa: S311 - an order, no secret
                    bed = grid(name).shuffled(chance, anywhere=True)
                    budget = Budget(bed, seconds, chance, gives_up=gives_up)
                    gaps.append(found(bed, budget, by_ascent(bed, budget)))
                    spent, saved = spent + budget.spent * (not gives_up), saved + budget.saved
                cells.append(told(gaps))
            each = f"{spent / len(orders):.0f} | {saved / len(orders):.1f}"
            yield f"| {name} | {seconds:.0f} | {' | '.join(cells)} | {each} |"


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=100)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seconds", default="240,480")
    parser.add_argument("--beds", default="grids,families", help="grids, or families")
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--given-up", action="store_true")
    arguments = parser.parse_args(argv)
    ways, orders = arguments.ways.split(","), range(arguments.orders)
    if arguments.left_out or arguments.given_up:
        table = left_out if arguments.left_out else given_up
        for line in table(orders, [*map(float, arguments.seconds.split(","))]):
            print(line, flush=True)
        return 0
    print("| bed | seconds | " + " | ".join(ways) + " |")
    print("|---|---:|" + "---:|" * len(ways))
    beds: list[tuple[str, Callable[[int], Bed], bool]] = []
    if "grids" in arguments.beds:
        beds += [(name, lambda _, name=name: grid(name), True) for name in GRIDS]  # type: ignore[misc]
    if "families" in arguments.beds:
        beds += [(one.name, lambda seed, one=one: world(one, 1000 + seed), False) for one in FAMILIES]  # type: ignore[misc]
    for name, bed_of, anywhere in beds:
        for seconds in map(float, arguments.seconds.split(",")):
            cells = [
                told([gap(bed_of(seed), WAYS[way], seconds, seed, anywhere=anywhere) for seed in orders])
                for way in ways
            ]
            print(f"| {name} | {seconds:.0f} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
