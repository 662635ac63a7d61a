"""Searches of 504 configurations made by chance, of which some hang: what a search loses to those, in 20 worlds.

``python -m tools.tuning_timeouts [--seconds 300,600]`` prints, for each way to hang, in how many worlds what was found
is within 1 % of the best that does not hang, and how many trials hung; first where a search is told of failures alone,
then where it is told that their time was over, as ``llmperf tune`` is.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from pytest_llmperf.judge.tuning_search import Outcome, Search
from tools.tuning_world import FIELD, TRAITS, world

Hangs = Callable[[int], bool]

_STEPS, _WORLDS, _WITHIN = 9, 20, 0.01
# Seconds of a trial outside of its steps, plain and compiled; and of one that hangs.
_PLAIN, _COMPILED, _LIMIT = 3.0, 15.0, 60.0
# Standard deviation of a trial.
_NOISE = 0.003


def searched(seed: int, hangs: Hangs, seconds: float, *, tells: bool) -> tuple[float, int]:
    """How far what is found is from the best that does not hang, and how many trials hung."""
    logs, chance, spent, late = world(seed), random.Random(seed), 0.0, set[int]()  # noqa: S311 - noise, no secret
    search = Search(FIELD, _STEPS, seed)
    while (number := next(search.promising(seconds - spent), None)) is not None:
        if hangs(number):
            late.add(number)
            spent += _LIMIT
            search.tell(number, Outcome(None, ran_out_seconds=_LIMIT if tells else 0.0))
            continue
        outside = _COMPILED if FIELD.compiles[number] else _PLAIN
        spent += outside + _STEPS * math.exp(logs[number]) * FIELD.tokens[number]
        search.costs.learn(compiles=FIELD.compiles[number], outside_seconds=outside)
        search.tell(number, Outcome(logs[number] + chance.gauss(0, _NOISE), 0.002))
    best = min(log for number, log in enumerate(logs) if number not in late and not hangs(number))
    order = search.in_order()
    return (logs[order[0]] - best if order else math.inf), len(late)


def has(**choices: object) -> Hangs:
    """Whatever has all of ``choices``."""
    return lambda number: all(TRAITS[number][name] == value for name, value in choices.items())


def _nth(which: int) -> Hangs:
    """A trial by its place, whatever it is of."""
    places = itertools.count(1)
    return lambda _: next(places) == which


#: Made anew for each world.
WAYS: Mapping[str, Callable[[], Hangs]] = {
    "a compiled model": lambda: has(compile="model"),
    "one attention": lambda: has(attention="flash"),
    "one kernel of two choices": lambda: has(norm=True),
    "two choices together": lambda: has(norm=True, compile="layers"),
    "the first of all alone": lambda: lambda number: number == 0,
    "the third trial, whatever it is": lambda: _nth(3),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", default="300,600")
    budgets = [float(one) for one in parser.parse_args(argv).seconds.split(",")]
    print("| what hangs | " + " | ".join(f"{seconds:.0f} s" for seconds in budgets) + " |")
    print("|---|" + "---:|" * len(budgets))
    for name, way in WAYS.items():
        cells = []
        for seconds in budgets:
            told = []
            for tells in (False, True):
                found = [searched(seed, way(), seconds, tells=tells) for seed in range(_WORLDS)]
                within = sum(gap < _WITHIN for gap, _ in found)
                told.append(f"{within} ({fmean(late for _, late in found):.1f})")
            cells.append(", now ".join(told))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
