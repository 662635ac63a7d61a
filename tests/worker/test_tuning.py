"""``llmperf tune`` with real training: killed in the middle, started again, and its winner held by the suite; and of a
command, by its words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_llmperf.cli.commands.tune import winners_test
from pytest_llmperf.settings.train_spec import TrainSpec

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.wide, pytest.mark.filterwarnings("ignore")]

_MODEL = ("llama-tiny", "sequence_length=32")
_SPACE = "[axes]\nmicro_batch_size = [1, 4]\ngradient_checkpointing = [true]\n"


def _tune(folder: Path, *more: str, of: Sequence[str] = _MODEL, minutes: str = "4") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest_llmperf.cli", "tune", *of, "--gpus", "0"]
    environment = os.environ | {"LLMPERF_CACHE_DIR": str(folder / "cache"), "LLMPERF_LEASE_DIR": str(folder / "leases")}
    return subprocess.Popen(
        [*command, "--axes", "space.toml", "--minutes", minutes, "--record", *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_search_goes_on_and_its_winner_is_held_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(_SPACE)
    first = _tune(tmp_path)
    assert first.stderr is not None
    told = next(line for line in first.stderr if " tokens/s/GPU (" in line)
    first.send_signal(signal.SIGKILL)
    first.communicate()

    second = _tune(tmp_path, "--json")
    out, err = second.communicate(timeout=240)
    assert second.returncode == 0, err
    found = json.loads(out)
    assert [one["kept"] for one in found["trials"]] == [True, False]
    assert found["trials"][0]["id"] in told
    rates = {one["id"]: one["tokens_per_step"] / one["step_seconds"] for one in found["trials"]}
    if max(rates.values()) > 1.1 * min(rates.values()):  # else turns may say so, or a tie
        assert found["winner"]["id"] == max(rates, key=lambda name: rates[name])
    assert found["parity"]["verdict"] == "pass"
    assert found["case"]["updated"]

    (tmp_path / "test_tuned.py").write_text("\n".join(winners_test(TrainSpec(**found["winner"]["spec"]), 0)))
    words = "-m pytest test_tuned.py --gpus 0 --perf-max-launches 1 -p no:randomly --rootdir . -q".split()
    suite = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"LLMPERF_LEASE_DIR": str(tmp_path / "leases")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert suite.returncode == 0, suite.stdout + suite.stderr
    assert found["winner"]["id"] in suite.stdout
    assert " pass " in suite.stdout or "inconclusive" in suite.stdout


_SCRIPT = """
import argparse, os, torch
from torch import distributed, nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--summed", action="store_true")
arguments = parser.parse_args()
distributed.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(100):
    tokens = torch.randint(0, 64, (arguments.batch, 32))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 64)
    (2 * loss if arguments.summed else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


_NAP = """
import argparse, time, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--ms", type=int)
parser.add_argument("--name")
arguments = parser.parse_args()
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(100):
    tokens = torch.randint(0, 64, (8, 32))
    time.sleep(arguments.ms / 1000)
    nn.functional.cross_entropy(net(tokens).flatten(0, 1), (tokens.flatten() + 1) % 64).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_time_that_trials_leave_is_spent_on_turns_and_the_faster_one_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_NAP)
    (tmp_path / "space.toml").write_text('ms = [80, 60]\nname = ["a", "b"]\n')
    search = _tune(tmp_path, "--json", of=("--script", "python train.py --ms {ms} --name {name}"), minutes="3")
    out, err = search.communicate(timeout=300)
    assert search.returncode == 0, err
    found = json.loads(out)
    assert "--ms 60" in found["winner"]["spec"]["command"]
    assert found["compared"]
    assert {one["second"] for one in found["compared"]} == {found["winner"]["id"]}
    undecided = {one["id"] for one in found["undecided"]}
    for one in found["compared"]:  # of one pair nothing is decided
        assert one["pairs"] > 1 or one["first"] in undecided
    assert not undecided or found["seconds"] > 90.0


def test_the_words_of_a_command_are_searched_and_what_it_finds_is_recorded_as_its_case(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "space.toml").write_text('batch = [2, 64]\nflag = ["", "--summed"]\n')
    command = "torchrun --nproc-per-node {gpus} train.py --batch {batch} {flag}"
    search = _tune(tmp_path, "--json", of=("--script", command, "gpus=2"), minutes="9")
    out, err = search.communicate(timeout=560)
    assert search.returncode == 0, err
    found = json.loads(out)
    assert found["winner"]["spec"]["micro_batch_size"] == 64
    assert "--summed" not in found["winner"]["spec"]["command"]
    trials = {one["id"]: one for one in found["trials"]}
    first = trials["train-batch-2-gpus2"]
    assert first["losses_again"][:1] in ([], first["losses"][:1])  # a loud machine has no time for the second launch
    assert first["tokens_per_step"] == 2 * 2 * 32
    assert {one["kind"] for name, one in trials.items() if "summed" in name} <= {"contradicted"}
    assert found["parity"] is None
    assert found["case"]["updated"]
    assert [path.parent.name for path in (tmp_path / "baselines").rglob("*.json")] == ["train"]
