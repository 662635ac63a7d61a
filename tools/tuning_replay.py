"""Searches of a measured grid replayed, in many random orders and with the noise of trials: none launches anything.

``python -m tools.tuning_replay docs/data/h200-grid-*.jsonl [--orders 100]`` prints, for each way to search and each
budget, in how many of the orders what was found is within 1 % of the best of the grid, and how many were launched.
Each grid's figures are taken for the truth; a trial shows them with its noise, and costs what it did cost. What trials
cannot tell apart takes turns, whose noise is smaller; their seconds count.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_llmperf.judge.tuning_search import CLOSE, Field, Outcome, Search
from pytest_llmperf.run.tuning.trial_stage import compiles
from pytest_llmperf.run.tuning.trials import STEPS
from pytest_llmperf.settings.batch import SIZE
from pytest_llmperf.settings.space import LARGER, recipes, traits
from pytest_llmperf.settings.train_spec import TrainSpec
from tools.tuning_grid import Measured, read

# Standard deviations: of a trial of few steps (beside its own error), and of a pair of launches that took turns.
_TRIAL_SD, _TURN_SD = 0.006, 0.003
_WITHIN = 0.01
_FINALISTS, _PAIRS, _FULL_STEPS = 3, 2, 24


@dataclass(frozen=True)
class Grid:
    """What a replay knows."""

    rows: Sequence[Measured]

    @property
    def best(self) -> float:
        """The least logarithm of seconds for a token."""
        return min(log for log in map(self.log, range(len(self.rows))) if log is not None)

    @property
    def counted(self) -> list[float] | None:
        """What can be counted of each; ``None`` where that was not."""
        found = [row.counted for row in self.rows if row.counted is not None]
        return found if len(found) == len(self.rows) else None

    def log(self, number: int) -> float | None:
        """The truth; ``None`` where it failed."""
        trial = self.rows[number].trial
        return math.log(trial.step_seconds / trial.tokens_per_step) if trial.is_measured else None

    def outside(self, number: int) -> float:
        """What its trial took beside its steps."""
        trial = self.rows[number].trial
        return trial.wall_seconds - trial.steps * trial.step_seconds

    def seconds(self, number: int, steps: int) -> float:
        """What a launch of so many steps takes."""
        return self.outside(number) + steps * self.rows[number].trial.step_seconds


class Budget:
    """The seconds that a search has, and the noise of what it sees."""

    def __init__(self, grid: Grid, seconds: float, seed: int) -> None:
        self.grid, self.left, self.launched = grid, seconds, 0
        self.chance = random.Random(seed)  # noqa: S311 - an order, no secret

    def trial(self, number: int, steps: int = STEPS) -> float | None:
        """The logarithm as it is seen; ``None`` where it failed.

        Raises:
            TimeoutError: no time is left for it.
        """
        seconds = self.grid.seconds(number, steps)
        if seconds > self.left:
            raise TimeoutError
        self.left -= seconds
        self.launched += 1
        log = self.grid.log(number)
        return None if log is None else log + self.chance.gauss(0, _TRIAL_SD * math.sqrt(STEPS / steps))

    def final(self, seen: Mapping[int, float]) -> int:
        """The best of those that are close to the best, by turns as long as there is time for them."""
        order = sorted(seen, key=lambda number: seen[number])
        best = order[0]
        for other in order[1:_FINALISTS]:
            cost = _PAIRS * sum(self.grid.seconds(number, _FULL_STEPS) for number in (best, other))
            if seen[other] - seen[order[0]] > CLOSE or cost > self.left:
                continue
            self.left -= cost
            logs = self.grid.log(best), self.grid.log(other)
            assert logs[0] is not None  # noqa: S101 - it was seen
            assert logs[1] is not None  # noqa: S101
            if logs[1] - logs[0] + self.chance.gauss(0, _TURN_SD) < 0:
                best = other
        return best


Way = Callable[[Grid, Budget, int], dict[int, float]]


def _recipes(specs: Sequence[TrainSpec], base: TrainSpec) -> Iterator[list[int]]:
    """Of each recipe over ``base`` those of ``specs`` that follow it, the largest first."""
    for recipe in recipes(base):
        sizes = (spec.micro_batch_size for spec in specs if spec.micro_batch_size <= LARGER * base.micro_batch_size)
        wanted = [replace(base, **recipe, micro_batch_size=size) for size in sorted(set(sizes), reverse=True)]
        found = [specs.index(one) for one in wanted if one in specs]
        if found:
            yield found


def by_surrogate(grid: Grid, budget: Budget, seed: int) -> dict[int, float]:
    """As ``llmperf tune`` searches, beginning anywhere; a fifth of the time is left for turns."""
    order, base = list(range(len(grid.rows))), grid.rows[0].spec
    budget.chance.shuffle(order)
    grid = budget.grid = Grid([grid.rows[number] for number in order])
    specs = [row.spec for row in grid.rows]
    search = Search(
        Field(
            traits=traits(specs),
            size=SIZE,
            tokens=[spec.sequences_per_step * spec.sequence_length for spec in specs],
            compiles=[compiles(spec) for spec in specs],
            prior=grid.counted,
            beginnings=list(_recipes(specs, base)),
        ),
        STEPS,
        seed,
    )
    kept = budget.left / 5
    while (number := next(search.promising(budget.left - kept), None)) is not None:
        try:
            log = budget.trial(number)
        except TimeoutError:
            break
        search.costs.learn(compiles=compiles(specs[number]), outside_seconds=grid.outside(number))
        search.tell(number, Outcome(log, 0.003))
    return {number: one.log for number, one in search.outcomes.items() if one.log is not None}


def by_surrogate_alone(grid: Grid, budget: Budget, seed: int) -> dict[int, float]:
    """The same without what can be counted."""
    return by_surrogate(Grid([replace(row, counted=None) for row in grid.rows]), budget, seed)


def by_chance(grid: Grid, budget: Budget, _seed: int) -> dict[int, float]:
    """One after the other, in a random order."""
    order = list(range(len(grid.rows)))
    budget.chance.shuffle(order)
    return dict(_in_order(budget, order))


def by_halving(grid: Grid, budget: Budget, _seed: int) -> dict[int, float]:
    """Successive halving (Karnin, Koren and Somekh 2013): all for few steps as far as a third of the time goes, the
    best quarter of them for twice as many, and again."""
    order, seen, steps, share = list(range(len(grid.rows))), dict[int, float](), 5, budget.left / 3
    budget.chance.shuffle(order)
    while order:
        until = budget.left - share
        for number in order:
            if budget.left <= until:
                break
            try:
                log = budget.trial(number, steps)
            except TimeoutError:
                break
            if log is not None:
                seen[number] = log
        tried = sorted((number for number in order if number in seen), key=lambda number: seen[number])
        order, steps = (tried[: len(tried) // 4], 2 * steps) if len(tried) > _FINALISTS else ([], steps)
    return seen


def by_optuna(grid: Grid, budget: Budget, seed: int) -> dict[int, float]:
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), asked and told; what is asked twice is free."""
    import optuna  # noqa: PLC0415 - it is no dependency of this project

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = [{name: str(value) for name, value in one.items()} for one in traits([row.spec for row in grid.rows])]
    numbers = {tuple(sorted(row.items())): number for number, row in enumerate(rows)}
    space = {name: sorted({row[name] for row in rows}) for name in rows[0]}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=8, multivariate=True))
    seen, failed, again = dict[int, float](), set[int](), 0
    while again < 1000:  # noqa: PLR2004 - it asks for the same again and again at the end
        one = study.ask()
        row = {name: one.suggest_categorical(name, values) for name, values in space.items()}
        number = numbers.get(tuple(sorted(row.items())))
        if number is None or number in failed:
            study.tell(one, state=optuna.trial.TrialState.FAIL)
            again += 1
            continue
        if number in seen:
            study.tell(one, seen[number])
            again += 1
            continue
        again = 0
        try:
            log = budget.trial(number)
        except TimeoutError:
            break
        if log is None:
            failed.add(number)
            study.tell(one, state=optuna.trial.TrialState.FAIL)
        else:
            seen[number] = log
            study.tell(one, log)
    return seen


def _in_order(budget: Budget, order: Sequence[int]) -> Iterator[tuple[int, float]]:
    for number in order:
        try:
            log = budget.trial(number)
        except TimeoutError:
            return
        if log is not None:
            yield number, log


WAYS: Mapping[str, Way] = {
    "counted": by_surrogate,
    "surrogate": by_surrogate_alone,
    "chance": by_chance,
    "halving": by_halving,
    "optuna": by_optuna,
}


def replayed(grid: Grid, way: Way, seconds: float, orders: int) -> tuple[float, float, float]:
    """The share of orders that end within 1 % of the best, the mean gap to it, and the mean number of launches."""
    gaps, launched = [], []
    for seed in range(orders):
        budget = Budget(grid, seconds, seed)
        seen = way(grid, budget, seed)
        log = budget.grid.log(budget.final(seen)) if seen else None
        gaps.append(math.inf if log is None else log - grid.best)
        launched.append(budget.launched)
    return fmean(gap <= _WITHIN for gap in gaps), fmean(min(gap, 1.0) for gap in gaps), fmean(launched)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="+", type=Path)
    parser.add_argument("--orders", type=int, default=100)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seconds", default="90,150,240,400")
    arguments = parser.parse_args(argv)
    budgets = [float(one) for one in arguments.seconds.split(",")]
    for path in arguments.grids:
        grid = Grid(read(path))
        whole = sum(grid.seconds(number, STEPS) for number in range(len(grid.rows)))
        failed = sum(not row.trial.is_measured for row in grid.rows)
        print(f"\n{path.name}: {len(grid.rows)} configurations, {failed} failed, {whole:.0f} s for all of them\n")
        print("| seconds | " + " | ".join(arguments.ways.split(",")) + " |")
        print("|---:|" + "---:|" * len(arguments.ways.split(",")))
        for seconds in budgets:
            cells: list[Any] = []
            for name in arguments.ways.split(","):
                share, gap, launched = replayed(grid, WAYS[name], seconds, arguments.orders)
                cells.append(f"{share * 100:.0f} % ({gap * 100:.1f} %, {launched:.0f})")
            print(f"| {seconds:.0f} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
