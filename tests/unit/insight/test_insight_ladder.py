"""What each rung of a ladder brings."""

from __future__ import annotations

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.analysis import ladder
from pytest_llmperf.analysis.ladder import Gain, Rung, gains
from pytest_llmperf.records.result import Reference

SPEC = TrainSpec(model="llama-tiny", sequence_length=64)
FITS, DOES_NOT = (
    Reference(source="s", tokens_per_second_per_gpu=1.0),
    Reference(source="s", tokens_per_second_per_gpu=None),
)
# The third ran out of memory where it was published.
RUNGS = [Rung(number, SPEC, reference) for number, reference in zip("1223", (FITS, None, DOES_NOT, FITS), strict=True)]


def test_a_trial_that_ran_out_of_memory_is_nothing_to_climb_from() -> None:
    found = gains(RUNGS, [10.0, 20.0, 5.0, 30.0])
    assert found == [Gain(None, 1.0), Gain(2.0, 2.0), Gain(0.25, 0.5), Gain(1.5, 3.0)]


def test_over_a_rung_without_a_figure_nothing_is_known() -> None:
    assert gains(RUNGS, [10.0, None, None, 30.0]) == [
        Gain(None, 1.0),
        Gain(None, None),
        Gain(None, None),
        Gain(None, 3),
    ]
    assert gains(RUNGS, [None, 20.0, 5.0, 30.0])[3] == Gain(1.5, None)
    assert gains([], []) == []


def test_the_published_ladder() -> None:
    found = gains(ladder.LLAMA, [rung.published_rate for rung in ladder.LLAMA])
    assert max(gain.over_previous or 0.0 for gain in found) == pytest.approx(24446 / 14315)
    assert found[-1].over_first == pytest.approx(48081 / 10485)


def test_a_rung_is_of_nine_tables_and_stands_once() -> None:
    for rungs in ladder.LADDERS:
        assert list(dict.fromkeys(rung.number for rung in rungs)) == [f"15.{number}" for number in range(1, 10)]
        assert len({rung.spec.digest for rung in rungs}) == len(rungs)
