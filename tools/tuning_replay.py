"""Searches of configurations of which all is known, replayed in many orders and with the noise of trials.

``python -m tools.tuning_replay [--orders 100] [--beds h200,families]`` prints, for each way to search and each budget,
the mean share of the best that was found, the share that 95 of 100 orders reached, how many orders came within 1 %, and
launches. Beds are the grids measured on an H200, which a search enters anywhere, and families of ``tuning_world``,
which it enters at its base: constants were chosen on ``CHOSEN_ON`` alone. Launches cost what they did.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from pytest_llmperf.judge.tuning import CLOSE, Outcome, Search
from pytest_llmperf.run.tuning.trials import STEPS
from pytest_llmperf.run.tuning.tuner import field_of
from pytest_llmperf.settings.space import Space, read_axes
from pytest_llmperf.settings.train_spec import TrainSpec
from tools.tuning_grid import read
from tools.tuning_world import FAMILIES, Family, Known, World, space

CHOSEN_ON = ("qwen-0.6b", "smollm-360m", "llama-8b-lora")
# Standard deviations: of a trial of few steps, and of a pair of launches that took turns.
_TRIAL_SD, _TURN_SD = 0.006, 0.003
_WITHIN, _END_SHARE = 0.01, 0.2
_FINALISTS, _PAIRS, _FULL_STEPS = 3, 2, 24
_DATA = Path(__file__).parents[1] / "docs" / "data"
GRIDS = {
    "Llama 3.2 1B": ("h200-grid-llama-3.2-1b.jsonl", "h200-grid.toml"),
    "OPT 1.3B": ("h200-part-of-grid-opt-1.3b.jsonl", "h200-grid-opt-1.3b.toml"),
}


@dataclass(frozen=True)
class Bed:
    """Configurations with what is known of each; the search begins at the first."""

    space: Space
    specs: Sequence[TrainSpec]
    known: Sequence[Known]

    def log(self, number: int) -> float:
        """Of its seconds for a token."""
        spec = self.specs[number]
        return math.log(self.known[number].step_seconds / (spec.sequences_per_step * spec.sequence_length))

    def shuffled(self, chance: random.Random, *, anywhere: bool) -> Bed:
        """In another order of its axes and its configurations, the first of which may stay."""
        order = list(range(len(self.specs)))
        rest = order if anywhere else order[1:]
        chance.shuffle(rest)
        order = rest if anywhere else [0, *rest]
        axes = tuple(chance.sample(self.space.axes, len(self.space.axes)))
        return Bed(Space(self.space.base, axes), [self.specs[n] for n in order], [self.known[n] for n in order])


@cache
def grid(name: str) -> Bed:
    """One that was measured; what failed in it ran out of memory."""
    rows, axes = (_DATA / one for one in GRIDS[name])
    measured = read(rows)
    known = [
        Known(
            step_seconds=one.trial.step_seconds or 1.0,
            outside=one.trial.wall_seconds - one.trial.steps * one.trial.step_seconds,
            peak=0.0 if one.trial.is_measured else math.inf,
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

    def __init__(self, bed: Bed, seconds: float, chance: random.Random) -> None:
        self.bed, self.left, self.chance = bed, seconds * (1 - _END_SHARE), chance
        self._kept = seconds * _END_SHARE
        self.launched = 0

    def cost(self, number: int, steps: int = STEPS) -> float:
        """What a launch takes."""
        return self.bed.known[number].outside + steps * self.bed.known[number].step_seconds

    def trial(self, number: int, steps: int = STEPS) -> float | None:
        """The logarithm as it is seen; ``None`` where no time is left for it."""
        if self.cost(number, steps) > self.left:
            return None
        self.left -= self.cost(number, steps)
        self.launched += 1
        return self.bed.log(number) + self.chance.gauss(0, _TRIAL_SD * math.sqrt(STEPS / steps))

    def final(self, seen: Mapping[int, float]) -> int:
        """The best of those that are close to the best, by turns as long as there is time for them."""
        order, left = sorted(seen, key=lambda number: seen[number]), self.left + self._kept
        best = order[0]
        for other in order[1:_FINALISTS]:
            cost = _PAIRS * (self.cost(best, _FULL_STEPS) + self.cost(other, _FULL_STEPS))
            if seen[other] - seen[order[0]] > CLOSE or cost > left:
                continue
            left -= cost
            if self.bed.log(other) - self.bed.log(best) + self.chance.gauss(0, _TURN_SD) < 0:
                best = other
        return best


def by_ascent(bed: Bed, budget: Budget) -> dict[int, float]:
    """As ``llmperf tune`` searches."""
    search, seen = Search(field_of(bed.space, bed.specs), STEPS), dict[int, float]()
    while (number := next(search.promising(budget.left), None)) is not None:
        if not bed.known[number].fits:
            search.excluded.add(number)
            continue
        log = budget.trial(number)
        if log is None:
            break
        seen[number] = log
        search.tell(number, Outcome(log, bed.known[number].step_seconds, bed.known[number].outside))
    return seen


def by_chance(bed: Bed, budget: Budget) -> dict[int, float]:
    """One after the other, in a random order."""
    return dict(_in_order(budget, [number for number, one in enumerate(bed.known) if one.fits]))


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
    seen = way(bed, budget)
    best = min(bed.log(number) for number, one in enumerate(bed.known) if one.fits)
    return (bed.log(budget.final(seen)) - best if seen else math.inf), budget.launched


def told(gaps: Sequence[tuple[float, int]]) -> str:
    """A cell: the mean share of the best, what 95 of 100 orders reach, how many are within 1 %, and launches."""
    far = sorted(one for one, _ in gaps)
    reached = math.exp(-far[min(len(far) - 1, math.ceil(0.95 * len(far)) - 1)])
    within = fmean(one <= _WITHIN for one in far)
    mean, launches = fmean(math.exp(-one) for one in far), fmean(number for _, number in gaps)
    return f"{mean:.1%} ({reached:.1%}, {within:.0%}, {launches:.0f})".replace("%", " %")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=100)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seconds", default="150,240,480")
    parser.add_argument("--beds", default="h200,families", help="h200, families (those left out), or chosen")
    arguments = parser.parse_args(argv)
    ways, orders = arguments.ways.split(","), range(arguments.orders)
    families = [one for one in FAMILIES if ("chosen" in arguments.beds) == (one.name in CHOSEN_ON)]
    print("| bed | seconds | " + " | ".join(ways) + " |")
    print("|---|---:|" + "---:|" * len(ways))
    beds: list[tuple[str, Callable[[int], Bed], bool]] = []
    if "h200" in arguments.beds:
        beds += [(f"{name}, measured", lambda _, name=name: grid(name), True) for name in GRIDS]  # type: ignore[misc]
    if "families" in arguments.beds or "chosen" in arguments.beds:
        beds += [(one.name, lambda seed, one=one: world(one, 1000 + seed), False) for one in families]  # type: ignore[misc]
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
