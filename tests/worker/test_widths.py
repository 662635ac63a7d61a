"""Two ranks under the real torchrun: their efficiency over one, measured in the same run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.worker.user import make, run

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

_RANKS = 2

CASE = """
from dataclasses import replace

import pytest

@pytest.mark.parametrize("gpus", [1, 2])
def test_width(perf, train_spec):
    perf.check(replace(train_spec, sequence_length=32, steps=8, min_steps=8))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < _RANKS, reason="a CPU's ranks are no more than its cores")
def test_two_ranks_show_their_efficiency_over_one(tmp_path: Path) -> None:
    document = run(make(tmp_path, CASE), "--update-baselines=new")
    told = (tmp_path / "log").read_text()
    assert document["exit_code"] == 0, told
    one, two = document["results"]
    rates = [result["metrics"]["tokens_per_second_per_gpu"]["value"] for result in (one, two)]
    efficiency = two["metrics"]["scaling_efficiency"]
    assert efficiency["value"] == pytest.approx(rates[1] / rates[0])
    assert efficiency["detail"] == "over 1 GPU of this run"
    assert two["metrics"]["speed_up"]["value"] == pytest.approx(2 * efficiency["value"])
    assert two["metrics"]["global_batch_tokens"]["value"] == 2 * 32
    assert 0 < two["metrics"]["communication_share"]["value"] < 1
    assert "communication_share" not in one["metrics"]
    # Each rank's canary is kept, and only where there are several.
    assert ["canary" in rank for rank in one["launches"][0]["ranks"]] == [False]
    assert ["matmul_flops" in rank["canary"] for rank in two["launches"][0]["ranks"]] == [True, True]
    assert "efficiency" in told
