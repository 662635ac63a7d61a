"""The rank that holds the others up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.analysis.waits import by_work, communication_share, held_up
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.fakes import launch_of
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=24, gpus=4)


def launch(
    seconds: Sequence[float], rates: Sequence[float] = (), jitter: float = 0.0, waits: Sequence[float] = ()
) -> Launch:
    """Ranks with these step times, every second step ``jitter`` longer, canaries and waits in each step."""
    run = launch_of(replace(SPEC, gpus=len(seconds)))
    ranks = [
        replace(
            rank,
            host=f"node{rank.rank // 2}",
            device=f"GPU-{rank.rank}",
            step_seconds=tuple(each * (1 + jitter * (step % 2)) for step in range(24)),
            waiting_seconds=(waits[rank.rank],) * 24 if waits else (),
            canary={"matmul_flops": rates[rank.rank]} if rates else {},
        )
        for rank, each in zip(run.ranks, seconds, strict=True)
    ]
    return replace(run, ranks=tuple(ranks))


def test_the_slowest_rank_is_named_with_its_node(golden: Golden) -> None:
    run = launch([0.1, 0.1, 0.1, 0.103])
    found = by_work(run)
    assert found is not None
    assert (found.rank, found.host, found.device) == (3, "node1", "GPU-3")
    assert found.share == pytest.approx(0.03)
    golden(held_up([run, run]))


def test_the_one_that_waits_least_works_longest_where_steps_are_equal() -> None:
    run = launch([0.1] * 4, waits=[0.006, 0.006, 0.002, 0.005])
    found = by_work(run)
    assert found is not None
    assert (found.rank, found.share > 0.02) == (2, True)
    assert found.share == pytest.approx(0.098 / 0.094 - 1)
    assert communication_share(run) == pytest.approx(0.02)  # what even the last one waits for is the exchange itself
    assert communication_share(launch([0.1] * 4)) is None
    assert held_up([launch([0.1] * 4, waits=[0.003, 0.003, 0.002, 0.003])]) == ()  # as chips of one host differ


def test_a_rank_that_does_not_tell_its_waits_is_not_held_against_the_others() -> None:
    run = launch([0.1] * 2, waits=[0.05, 0.05])
    silent = replace(run, ranks=(run.ranks[0], replace(run.ranks[1], waiting_seconds=())))
    assert held_up([silent]) == ()
    assert communication_share(silent) is None


def test_waits_are_kept_in_the_record_and_are_of_its_steps(golden: Golden) -> None:
    run = launch([0.1] * 2, waits=[0.01, 0.02])
    assert codec.read(Launch, codec.plain(run)) == run
    values = codec.plain(run)
    assert "waiting_seconds" not in codec.plain(launch([0.1] * 2))["ranks"][0]
    values["ranks"][1]["waiting_seconds"] = values["ranks"][1]["waiting_seconds"][1:]
    with pytest.raises(ValueError, match="waiting_seconds of other") as raised:
        codec.read(Launch, values)
    golden(raised)


def test_ranks_that_wait_for_one_another_show_nobody() -> None:
    assert held_up([launch([0.1] * 4)]) == ()
    assert held_up([launch([0.1, 0.1, 0.1, 0.1015])]) == ()  # as chips of one host differ
    assert held_up([launch([0.1, 0.1, 0.1, 0.104], jitter=0.5)]) == ()  # less than its steps scatter


def test_it_has_to_be_the_same_one_every_time() -> None:
    first, second = launch([0.1, 0.1, 0.1, 0.12]), launch([0.1, 0.12, 0.1, 0.1])
    assert held_up([first, second]) == ()
    assert held_up([first, launch([0.1] * 4)]) == ()


def test_one_rank_and_old_records_tell_nothing() -> None:
    assert by_work(launch([0.1])) is None
    assert held_up([launch([0.1])]) == ()


def test_a_ranks_canary_is_kept_in_the_record() -> None:
    run = launch([0.1, 0.1], rates=[1e12, 2e12])
    assert codec.read(Launch, codec.plain(run)) == run
    assert "canary" not in codec.plain(launch([0.1]))["ranks"][0]


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=8))
def test_the_slowest_is_no_faster_than_the_others(seconds: list[float]) -> None:
    found = by_work(launch(seconds))
    assert found is not None
    assert found.share >= 0
    assert seconds[found.rank] == max(seconds)
