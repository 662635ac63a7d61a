"""Which of two configurations is the better one, from launches that took turns."""

from __future__ import annotations

import pytest

from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.tuning import OBJECTIVES, Turns, turns_of
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of

_SPEC = TrainSpec(model="llama-tiny")


def _launch(seconds: float, mib: float) -> Launch:
    return launch_of(_SPEC, Fake(step_seconds=seconds, reserved_bytes=round(mib * 2**20)))


def _turns(objective: str, *pairs: tuple[Launch, Launch]) -> Turns:
    found = turns_of(pairs, OBJECTIVES[objective], Policy.for_gpu().noise)
    assert found is not None
    return found


def test_memory_is_not_held_by_the_noise_of_times() -> None:
    """Times that scatter by half say nothing of memory, of which 1 % is told apart by one pair."""
    pairs = [(_launch(0.1, 1000), _launch(0.15, 990)), (_launch(0.15, 1000), _launch(0.1, 990))]
    assert _turns("throughput", *pairs).verdict == ""
    assert _turns("memory", pairs[0]).verdict == "second"
    assert _turns("memory", *pairs).wide < 0.004


def test_alike_in_memory_is_a_tie_at_once_and_what_scatters_is_none() -> None:
    alike = (_launch(0.1, 1000), _launch(0.2, 1001))
    assert _turns("memory", alike).verdict == "tie"
    scattering = [(_launch(0.1, 1000), _launch(0.1, 1100)), (_launch(0.1, 1100), _launch(0.1, 1000))]
    assert _turns("memory", *scattering).verdict == ""


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_what_takes_half_the_time_is_better(objective: str) -> None:
    assert _turns(objective, (_launch(0.2, 1000), _launch(0.1, 2000))).verdict == "second"
