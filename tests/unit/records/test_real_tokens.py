"""Real tokens beside slots: what a record holds, what follows from it, and what an older record means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.validity import unusable
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run import derived_metrics
from pytest_llmperf.run.derived_metrics import ModelFlops
from pytest_llmperf.support import codec
from tests.fakes import launch_of
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny", data="text", rows="padded", gpus=2, sequence_length=64, steps=4, warmup_steps=1)


def counted(*by_rank: tuple[int, ...]) -> Launch:
    launch = launch_of(SPEC)
    return replace(
        launch, ranks=tuple(replace(rank, real_tokens=each) for rank, each in zip(launch.ranks, by_rank, strict=True))
    )


def test_the_rate_in_slots_stays_and_that_in_real_tokens_is_shown_beside_it() -> None:
    launch = counted((64, 32, 32, 64), (16, 16, 16, 16))
    assert launch.tokens_per_second_per_gpu == launch_of(SPEC).tokens_per_second_per_gpu
    assert launch.real_share == (192 + 64) / (8 * 64)
    shown = {check.metric: check for check in derived_metrics.figures(SPEC, (launch,), ModelFlops())}
    assert shown["real_tokens_per_second_per_gpu"].value == pytest.approx(launch.tokens_per_second_per_gpu / 2)
    assert shown["real_token_share"].value == 0.5
    assert not any(check.gates for check in shown.values())


def test_of_an_older_record_and_of_one_without_padding_all_tokens_are_real() -> None:
    launch = launch_of(SPEC)
    assert all("real_tokens" not in rank for rank in codec.plain(launch)["ranks"])
    assert codec.read(Launch, codec.plain(launch)).real_share == 1
    shown = derived_metrics.figures(SPEC, (launch,), ModelFlops())
    assert not any("real" in check.metric for check in shown)


def test_a_record_keeps_them_by_step_and_rank(golden: Golden) -> None:
    launch = counted((64, 1, 0, 64), (3, 2, 1, 0))
    assert codec.read(Launch, codec.plain(launch)) == launch
    assert list(unusable(launch)) == []
    short = codec.plain(launch)
    short["ranks"][1]["real_tokens"] = [3, 2]
    with pytest.raises(ValueError, match="real_tokens of other") as raised:
        codec.read(Launch, short)
    golden(raised)


def test_more_real_tokens_than_tokens_are_no_figure() -> None:
    said = "more real tokens were counted than there were tokens, or fewer than none on rank 1"
    assert list(unusable(counted((64,) * 4, (64, 65, 64, 64)))) == [said]
    assert list(unusable(counted((64,) * 4, (64, -1, 64, 64)))) == [said]
