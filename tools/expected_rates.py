"""How far expected rates are off: each stored case of a GPU told by the others, as if it had never been launched.

    python -m tools.expected_rates [--write]

Four ways: with all other stored launches, those of the same case on another kind of GPU included; without its case, or
its model, on any; and as a first launch on a kind of GPU without baselines, which brings its chip's rates alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.analysis.expectation import Case, Expectation, estimated, filled, with_error
from pytest_llmperf.run.derived_metrics import stored_cases
from tools import tables

BASELINES = Path(__file__).parents[1] / "baselines"
#: By name, whether a case may be told of by another.
WAYS: Mapping[str, Callable[[Case, Case], bool]] = {
    "all others": lambda _, __: True,
    "no GPU has its case": lambda case, other: case.digest != other.digest,
    "no case has its model": lambda case, other: not case.is_of(other),
    "another kind of GPU": lambda case, other: case.kind != other.kind,
}


_NEAR = 0.05


@dataclass(frozen=True)
class Told:
    case: Case
    found: Expectation

    @property
    def off(self) -> float:
        """Of the rate, as a fraction."""
        return self.case.step_seconds / self.found.step_seconds - 1

    @property
    def is_within(self) -> bool:
        return abs(math.log1p(self.off)) <= self.found.error


def told(cases: Sequence[Case]) -> dict[str, list[Told]]:
    """By way. How far off a case may be is what others are off, whichever way they are told."""
    bare = {
        name: [
            (case, estimated(case, filled([one for one in cases if one is not case and may(case, one)])))
            for case in cases
        ]
        for name, may in WAYS.items()
    }
    known = {name: [(case, one) for case, one in found if one] for name, found in bare.items()}
    others = [each for way, found in known.items() if way != "another kind of GPU" for each in found]
    errors = [(case, one.far, abs(math.log(one.step_seconds / case.step_seconds))) for case, one in others]

    def ranged(case: Case, one: Expectation) -> Told:
        return Told(case, with_error(one, [each for each in errors if each[0].digest != case.digest]))

    return {name: [ranged(*each) for each in found] for name, found in known.items()}


def summary(found: Sequence[Told]) -> tuple[str, ...]:
    off = sorted(abs(one.off) for one in found)
    near, inside = sum(each <= _NEAR for each in off), sum(one.is_within for one in found)
    most = off[-1 - len(off) // 10]
    return str(len(off)), str(near), f"{off[len(off) // 2] * 100:.1f} %", f"{most * 100:.1f} %", str(inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    tables.add_option(parser)
    is_kept = parser.parse_args().write
    cases = stored_cases(BASELINES)
    ways = told(cases)
    head = ("told by", "cases", "within 5 %", "median", "9 of 10 within", "in their range")
    by_kind = [
        (f"{name}, {kind}", *summary([one for one in found if one.case.kind == kind]))
        for name, found in ways.items()
        for kind in sorted({one.case.kind for one in found})
    ]
    every = [(name, *summary(found)) for name, found in ways.items()]
    tables.table([head, *every, *by_kind], "expected-rates" if is_kept else "")
    print()
    off = {name: {id(one.case): f"{one.off * 100:+.1f} %" for one in found} for name, found in ways.items()}
    rows = [
        (
            case.kind,
            case.spec.id,
            f"{case.tokens / case.step_seconds:,.0f}",
            *(off[name].get(id(case), "") for name in WAYS),
        )
        for case in cases
    ]
    tables.table([("GPU", "case", "tokens/s/GPU", *WAYS), *sorted(rows)])


if __name__ == "__main__":
    main()
