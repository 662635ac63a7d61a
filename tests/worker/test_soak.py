"""Soaks of real trainings: faults of each kind are found in one record, and Ctrl-C keeps what was seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_llmperf.judge.soak import Diary
from pytest_llmperf.records.ranks import diaries
from tests.waiting import until
from tests.worker.user import QUICK_PATH, RESULTS, make, run_one, start

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun]

# Everything that goes wrong in hours, in seconds.
FAULTY = """
import gc, os, threading, time
import torch

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))
optimizer = torch.optim.AdamW(model.parameters())
garbage = [[{} for _ in range(10)] for _ in range(8000)]  # what a collection has to look at
tensors, small, files, stop, began = [], [], [], threading.Event(), time.monotonic()


class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(1, 10**9):
            time.sleep(0.3 * (number % 70 == 0))
            yield torch.randn(32, 128)


for step, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=None), 1):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    time.sleep(0.005 if time.monotonic() - began < 12 else 0.04)
    tensors.append(torch.randn(16384))
    small.append([{"step": step, "number": number} for number in range(400)])
    if step % 10 == 0:
        files.append(open(os.devnull))
    if step % 25 == 0:
        threading.Thread(target=stop.wait, daemon=True).start()
    if step % 40 == 0:
        gc.collect()
    if step % 60 == 0:
        torch.save(torch.randn(2**20), "checkpoint.pt")
        time.sleep(0.4)
"""

SHORT = """
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(200):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""

HANGS = (
    SHORT.replace("range(200)", "range(60)")
    + """

def wait_for_nothing():
    import time

    time.sleep(1e6)


wait_for_nothing()
"""
)

SCRIPT = """
def test_script(perf):
    perf.soak("python train.py", minutes=0.4)
"""

SPEC = """
from dataclasses import replace

def test_spec(perf, train_spec):
    perf.soak(replace(train_spec, gpus=2, sequence_length=16), minutes=30)
"""


@pytest.mark.wide
def test_each_kind_of_fault_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAULTY)
    found = run_one(make(tmp_path, SCRIPT), "-o", "perf_throughput_tolerance=0.3")
    told = "\n".join(found["soak"]["findings"])
    assert found["verdict"] == "regressed"
    for words in (
        "steps take",
        "its loader",
        "garbage",
        "a checkpoint",
        "of tensors",
        "of the process",
        "files",
        "threads",
        "1 Tensor in 'tensors' of train.py",
        "1 list in 'small' of train.py",
    ):
        assert words in told, told
    assert found["soak"]["seconds"] == pytest.approx(24, abs=5)


@pytest.mark.wide
def test_a_script_that_ends_before_is_told_of_minutes_and_of_no_number_of_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHORT)
    found = run_one(make(tmp_path, SCRIPT), path=QUICK_PATH)
    assert found["verdict"] == "invalid"
    assert ("after 200 steps" in found["reason"], "expected" in found["reason"]) == (True, False), found["reason"]


@pytest.mark.wide
def test_a_training_that_hangs_is_ended_long_before_its_minutes_with_the_line_where_it_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS)
    found = run_one(make(tmp_path, SCRIPT.replace("0.4", "30")), "--perf-timeout", "60", seconds=120, path=QUICK_PATH)
    assert (found["verdict"], found["soak"]["steps"]) == ("invalid", 60)
    assert ("no step for" in found["reason"], "step 60: " in found["reason"]) == (True, True), found["reason"]
    assert "in wait_for_nothing" in (tmp_path / "log").read_text()


def test_ctrl_c_keeps_what_was_seen_and_each_rank_kept_a_diary(tmp_path: Path) -> None:
    run = start(make(tmp_path, SPEC))

    def seconds() -> float:
        """Of rank 0's diary by now."""
        launch = next(tmp_path.glob(".llmperf/*/*gpus2*"), tmp_path)
        return max((Diary(one).seconds for one in diaries(launch)), default=0.0)

    try:
        until(lambda: seconds() > 2, 120, (tmp_path / "log").read_text)
        run.terminate()
        assert run.wait(60) == 2, (tmp_path / "log").read_text()
    finally:
        run.kill()
        run.wait()
    (found,) = json.loads((tmp_path / RESULTS).read_text())["results"]
    assert found["soak"]["seconds"] > 1.5
    assert "30 min: interrupted" in found["reason"]  # on a busy machine in few steps, which it says too
    both = [len(Diary(one).steps) for one in diaries(next(tmp_path.glob(".llmperf/*/*gpus2*")))]
    assert len(both) == 2
    assert both[0] == pytest.approx(both[1], abs=200)
