"""Which of two configurations is the better one, from launches that took turns."""

from __future__ import annotations

import pytest

from pytest_llmperf.judge.objective import OBJECTIVES, Turns, turns_of
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of

_SPEC, _CPU = TrainSpec(model="llama-tiny"), Policy.for_cpu()


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


def test_of_looks_after_each_pair_more_is_asked_for_than_of_one() -> None:
    pairs = [(_launch(0.1, 1000), _launch(seconds, 1000)) for seconds in (0.0993, 0.0996, 0.0993, 0.0996)]
    once, ends_anywhere = (
        turns_of(pairs, OBJECTIVES["throughput"], Policy.for_gpu().noise, ends_anywhere=looks)
        for looks in (False, True)
    )
    assert once is not None
    assert ends_anywhere is not None
    assert (once.verdict, ends_anywhere.verdict) == ("second", "")
    assert 1.2 < ends_anywhere.wide / once.wide < 1.4


def test_on_a_cpu_what_is_closer_than_its_launches_scatter_is_a_tie() -> None:
    pairs = [(_launch(0.1, 1000), _launch(0.1 + 0.002 * (-1) ** number, 1000)) for number in range(8)]
    on_gpu, on_cpu = (turns_of(pairs, OBJECTIVES["throughput"], one.noise) for one in (Policy.for_gpu(), _CPU))
    assert on_gpu is not None
    assert on_cpu is not None
    assert (on_gpu.verdict, on_cpu.verdict) == ("", "tie")


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_what_takes_half_the_time_is_better(objective: str) -> None:
    assert _turns(objective, (_launch(0.2, 1000), _launch(0.1, 2000))).verdict == "second"
