"""Real tokens beside slots: what a record holds, what follows from it, and what an older record means."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.stats import log_of
from pytest_llmperf.judge.validity import troubles, unusable
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import pooled_tokens_per_second
from pytest_llmperf.run.derived_metrics import ModelFlops
from pytest_llmperf.support import codec
from tests.fakes import Fake, launch_of
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
    shown = {check.metric: check for check in ModelFlops().figures(SPEC, (launch,))}
    assert shown["real_tokens_per_second_per_gpu"].value == pytest.approx(launch.tokens_per_second_per_gpu / 2)
    assert shown["real_token_share"].value == 0.5
    assert not any(check.gates for check in shown.values())


def test_of_an_older_record_and_of_one_without_padding_all_tokens_are_real() -> None:
    launch = launch_of(SPEC)
    assert all("real_tokens" not in rank for rank in codec.plain(launch)["ranks"])
    assert codec.read(Launch, codec.plain(launch)).real_share == 1
    shown = ModelFlops().figures(SPEC, (launch,))
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


class TestUneven:
    """Rows without padding: a step has as many tokens as its documents."""

    FREE = replace(SPEC, rows="padding_free", gpus=1)

    def launch(self, *tokens: int, seconds_each: float = 0.001) -> Launch:
        record = launch_of(self.FREE, Fake(evidence={"data": {"rows": "padding_free"}}))
        times = tuple(each * seconds_each for each in tokens)
        seen: dict[str, Any] = {"step_tokens": tokens, "real_tokens": tokens}
        seen["tokens_per_step"] = round(sum(tokens) / len(tokens))
        return replace(record, ranks=(replace(record.ranks[0], step_seconds=times, **seen),))

    def test_launches_of_other_documents_have_one_rate(self) -> None:
        one, other = self.launch(60, 40, 64, 20), self.launch(64, 30, 10, 50)
        assert pooled_tokens_per_second([one, other]) == pytest.approx(1000)
        assert log_of(one) == pytest.approx(log_of(other)) == pytest.approx(math.log(0.001))
        assert (one.real_share, [*unusable(one)]) == (1, [])

    def test_they_have_no_more_tokens_than_their_rows(self) -> None:
        assert not [line for line in troubles(self.FREE, self.launch(60, 40, 64, 20)) if "tokens a step" in line]
        (line,) = [line for line in troubles(self.FREE, self.launch(70, 65, 66, 67)) if "tokens a step" in line]
        assert line.startswith("67 tokens")


def test_a_launch_is_on_a_node_where_all_its_ranks_are_on_one() -> None:
    launch = launch_of(SPEC)
    assert launch.is_on_a_node
    first, second = launch.ranks
    assert not replace(launch, ranks=(first, replace(second, host="another"))).is_on_a_node
