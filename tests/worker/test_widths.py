"""Two ranks under the real torchrun: their efficiency over one, measured in the same run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf.support import codec
from tests.worker import engine

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

_RANKS = 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < _RANKS, reason="a CPU's ranks are no more than its cores")
def test_two_ranks_show_their_efficiency_over_one(tmp_path: Path) -> None:
    run = engine.checks(tmp_path, update="new")
    spec = replace(engine.SPEC, sequence_length=32, steps=8, min_steps=8)
    one, two = (run.check(replace(spec, gpus=gpus)).result for gpus in (1, 2))
    assert (one.verdict, two.verdict) == ("new", "new")
    measured = {check.metric: check for check in two.checks}
    efficiency, share = measured["scaling_efficiency"], measured["communication_share"]
    rates = [check.value for each in (one, two) if (check := each.check("tokens_per_second_per_gpu"))]
    assert efficiency.value == pytest.approx(rates[1] / rates[0])
    assert efficiency.detail == "over 1 GPU of this run"
    assert measured["speed_up"].value == pytest.approx(2 * efficiency.value)
    assert measured["global_batch_tokens"].value == 2 * 32
    assert 0 < share.value < 1
    assert one.check("communication_share") is None
    # Each rank's canary is kept, and only where there are several.
    ranks = [codec.plain(each.launches[0])["ranks"] for each in (one, two)]
    assert ["canary" in rank for rank in ranks[0]] == [False]
    assert ["matmul_flops" in rank["canary"] for rank in ranks[1]] == [True, True]
