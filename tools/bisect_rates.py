"""How often a bisection by speed names the right revision, and what it costs: simulated, with a GPU's noise.

    python -m tools.bisect_rates [SEARCHES] [--write]

It uses the rules that `llmperf bisect` uses, on launches that have a step time and nothing else.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from pytest_llmperf.judge.pairs import Side, compared_ends, side_of
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.records.result import Candidate
from pytest_llmperf.run.bisection import Lineage, most_steps
from tools import tables

_POLICY = Policy.for_gpu()
_PAIRS, _ALPHA = 8, 0.05
_REVISIONS = (4, 64)
_CHANGES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05)


@dataclass(frozen=True)
class _Timed:
    median_step_seconds: float
    median_error: float = 0.0
    is_uneven: bool = False


def _search(num: int, change: float, chance: random.Random) -> tuple[str, int]:
    """What became of one, and its launches."""
    first, sd, launches = chance.randrange(num), _POLICY.noise.launch.sd, 0
    alpha = _ALPHA / (most_steps(num) + 2)

    def pair(number: int) -> Any:
        truth = math.log1p(change) if number >= first else 0.0
        return tuple(_Timed(math.exp(mean + chance.gauss(0, sd))) for mean in (0.0, truth))

    def decided(number: int, decide: Any) -> Any:
        nonlocal launches
        pairs: list[Any] = []
        while True:
            pairs.append(pair(number))
            launches += 2
            told = decide(pairs)
            if not told.goes_on:
                return told

    ends = decided(num - 1, lambda pairs: compared_ends(pairs, _POLICY, ["speed"], alpha=alpha, budget=_PAIRS))
    if ends.yardstick is None:
        return "tie", launches
    lineage = Lineage([Candidate(str(one), (str(one - 1),)) for one in range(num)])
    sides: dict[str, Side] = {str(num - 1): "bad"}
    while (candidate := lineage.following(sides)) is not None:
        told = decided(
            int(candidate.name),
            lambda pairs: side_of(pairs, ends.yardstick, _POLICY, alpha=alpha, budget=_PAIRS),
        )
        sides[candidate.name] = cast("Side", told.side)
    names = [one.name for one in lineage.suspects(sides)]
    if str(first) not in names:
        return "wrong", launches
    return ("found" if len(names) == 1 else "range"), launches


def rates(searches: int) -> Iterator[tuple[str, ...]]:
    """A row for each number of revisions and each change."""
    yield ("revisions", "change", "found", "range", "tie", "wrong", "launches (median, most)")
    for num in _REVISIONS:
        for change in _CHANGES:
            chance = random.Random(f"{num} {change}")  # noqa: S311 - a simulation
            ended = [_search(num, change, chance) for _ in range(searches)]
            shares = (sum(one == what for one, _ in ended) / searches for what in ("found", "range", "tie", "wrong"))
            spent = sorted(launches for _, launches in ended)
            cells = (f"{100 * share:.1f} %" for share in shares)
            yield (str(num), f"{100 * change:.1f} %", *cells, f"{spent[len(spent) // 2]}, {spent[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("searches", nargs="?", type=int, default=1000)
    tables.add_option(parser)
    options = parser.parse_args()
    tables.table(rates(options.searches), "bisect" * options.write)


if __name__ == "__main__":
    main()
