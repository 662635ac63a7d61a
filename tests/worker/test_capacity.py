"""The largest micro-batch, sought by real torchrun under a real limit of memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.records.failure import Failure
from tests.worker.launching import launch
from tests.worker.user import make, run_one

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")]

LIMIT = ("--perf-memory-limit", "150MiB")

CASE = """
from dataclasses import replace

def test_case(perf, train_spec):
    perf.max_micro_batch(replace(train_spec, sequence_length=512, micro_batch_size=8))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_is_found_recorded_and_its_loss_is_seen(tmp_path: Path) -> None:
    make(tmp_path, CASE)
    first = run_one(tmp_path, *LIMIT, "--update-baselines=new")
    size = first["metrics"]["max_micro_batch_size"]["value"]
    assert first["verdict"] == "new"
    assert size >= 2
    (path,) = tmp_path.rglob("baselines/*-limit-0.146484gib/*/capacity/*.json")
    assert json.loads(path.read_text())["history"][-1]["metrics"]["max_micro_batch_size"] == size
    # A third of the limit is held by something else: fewer sequences fit, and that is a loss.
    second = run_one(tmp_path, *LIMIT, inject="hold=60000000")
    assert second["metrics"]["max_micro_batch_size"]["value"] < size
    assert (second["verdict"], second["metrics"]["max_micro_batch_size"]["baseline"]) == ("regressed", size)


def test_a_launch_beyond_the_limit_runs_out_of_memory(tmp_path: Path) -> None:
    spec = TrainSpec(model="llama-tiny", sequence_length=512, micro_batch_size=64, steps=3, min_steps=3, warmup_steps=1)
    failure = launch(spec, tmp_path / "run", memory_limit_bytes=100 * 2**20)
    assert isinstance(failure, Failure)
    assert failure.kind == "oom"
