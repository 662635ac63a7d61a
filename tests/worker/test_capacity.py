"""The largest micro-batch, sought by real torchrun under a real limit of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.course import Failure
from pytest_llmperf.launch.local import LaunchRequest, LocalLauncher

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")]

REPOSITORY = Path(__file__).parents[2]

CASE = """
from dataclasses import replace

def test_case(perf, train_spec):
    perf.max_micro_batch(replace(train_spec, sequence_length=512, micro_batch_size=8))
"""


def run(folder: Path, *options: str, inject: str = "") -> dict[str, Any]:
    """The one result of a run in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LLMPERF_INJECT": inject}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "--gpus", "0", "--perf-memory-limit", "150MiB"]
    subprocess.run(
        [*command, "--perf-json", "out.json", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=400,
        check=False,
    )
    (result,) = json.loads((folder / "out.json").read_text())["results"]
    return dict(result)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_is_found_recorded_and_its_loss_is_seen(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(CASE)
    first = run(tmp_path, "--update-baselines=new")
    size = first["metrics"]["max_micro_batch_size"]["value"]
    assert first["verdict"] == "new"
    assert size >= 2
    (path,) = tmp_path.rglob("baselines/*-limit-0.146484gib/*/capacity/*.json")
    assert json.loads(path.read_text())["history"][-1]["metrics"]["max_micro_batch_size"] == size
    # A third of the limit is held by something else: fewer sequences fit, and that is a loss.
    second = run(tmp_path, inject="hold=60000000")
    assert second["metrics"]["max_micro_batch_size"]["value"] < size
    assert (second["verdict"], second["metrics"]["max_micro_batch_size"]["baseline"]) == ("regressed", size)


def test_a_launch_beyond_the_limit_runs_out_of_memory(tmp_path: Path) -> None:
    spec = TrainSpec(model="llama-tiny", sequence_length=512, micro_batch_size=64, steps=3, min_steps=3, warmup_steps=1)
    request = LaunchRequest(
        spec=spec, folder=tmp_path / "run", gpus=(), timeout_seconds=200, memory_limit_bytes=100 * 2**20
    )
    failure = LocalLauncher().launch(request, lambda _: None)
    assert isinstance(failure, Failure)
    assert failure.kind == "oom"
