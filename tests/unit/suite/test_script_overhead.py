"""What the hook costs: a number of each launch, an interval of how launches scatter, and their mean over commands."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import Golden
from tools.script_overhead import Turns, all_of

seconds = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8)


def turns(hooked: list[float], bare: list[float]) -> Turns:
    """Launches whose steps all take as long."""
    return Turns(own={True: [(one, one) for one in hooked], False: [(one, one) for one in bare]})


@given(seconds, seconds)
def test_the_overhead_is_the_ratio_of_geometric_means(hooked: list[float], bare: list[float]) -> None:
    means = [math.exp(sum(map(math.log, each)) / len(each)) for each in (hooked, bare)]
    assert math.exp(turns(hooked, bare).overhead) == pytest.approx(means[0] / means[1])


def test_two_launches_of_each_kind_make_an_interval_and_one_does_not(golden: Golden) -> None:
    assert "no interval" in all_of({"a": turns([1.01], [1.0])})
    said = all_of({"a": turns([1.0, 1.02], [1.0, 1.0]), "b": turns([2.0, 2.02], [2.0, 2.0])})
    low, high = map(float, re.findall(r"95 %: (\S+) to (\S+)\)", said)[0])
    assert low < 0.75 < high
    golden(said)


def test_commands_that_scatter_alike_narrow_one_another() -> None:
    one, many = turns([1.0, 1.02], [1.0, 1.01]), {str(n): turns([1.0, 1.02], [1.0, 1.01]) for n in range(5)}

    def width(said: str) -> float:
        low, high = map(float, re.findall(r"95 %: (\S+) to (\S+)\)", said)[0])
        return high - low

    assert width(all_of(many)) < width(all_of({"a": one})) / 2
