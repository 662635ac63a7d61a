"""The static gate of a user's own script: its small form really runs, and a wait that is put into it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker import user
from tests.worker.user import QUICK_PATH

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

TRAIN = """
import sys
import torch

width = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    loss = model(torch.randn(4, width)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CASE = """
def test_mine(perf):
    perf.script("python train.py 1000000", tiny="python train.py 8", steps=10)
"""
UNREPEATED = "    for _ in range(time.time_ns() % 997): loss.log()\n"


def project(folder: Path, script: str) -> Path:
    (folder / "train.py").write_text(script)
    return user.make(folder, CASE)


@pytest.mark.slow
def test_a_wait_a_step_is_found_by_the_small_form_and_its_line_is_named(tmp_path: Path) -> None:
    folder = project(tmp_path, TRAIN)
    assert user.run_one(folder, "--perf-static", "--update-baselines=new", path=QUICK_PATH)["verdict"] == "new"
    kept = user.run(folder, "--perf-static", path=QUICK_PATH)
    assert [result["verdict"] for result in kept["results"]] == ["pass"]
    assert kept["spent"]["launches"] == 1
    (folder / "train.py").write_text(TRAIN.replace(".mean()\n", ".mean()\n    seen = loss.item()\n"))
    found = user.run_one(folder, "--perf-static", path=QUICK_PATH)
    assert (found["verdict"], found["metrics"]["synchronisations_per_step"]["value"]) == ("regressed", 1)
    assert "1 a step at train.py:10 (`seen = loss.item()`)" in found["diagnosis"]


@pytest.mark.slow
@pytest.mark.wide
def test_what_does_not_repeat_is_not_claimed(tmp_path: Path) -> None:
    script = TRAIN.replace("import sys\n", "import sys, time\n")
    script = script.replace("    loss.backward()\n", f"{UNREPEATED}    loss.backward()\n")
    document = user.run(project(tmp_path, script), "--perf-static", "--update-baselines")
    (skipped,) = document["skipped"]
    assert skipped["reason"].startswith("train-1000000-gpus1: not claimed: its small form does not repeat itself")
    assert not (tmp_path / "baselines").exists()
