"""Two ranks under the real torchrun: their efficiency over one, measured in the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]

OPTIONS = ["--gpus=0", "--update-baselines=new", "--perf-json=out.json"]

CASE = """
from dataclasses import replace

import pytest

@pytest.mark.parametrize("gpus", [1, 2])
def test_width(perf, train_spec):
    perf.check(replace(train_spec, sequence_length=32, steps=8, min_steps=8))
"""


def test_two_ranks_show_their_efficiency_over_one(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_case.py").write_text(CASE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:randomly", *OPTIONS, "."],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    one, two = json.loads((tmp_path / "out.json").read_text())["results"]
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
    assert "efficiency" in done.stdout
