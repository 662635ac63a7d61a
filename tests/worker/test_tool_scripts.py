"""The scripts of tools/scripts, watched at their tiny size: what the hook says of each is what the script does."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.spec import ScriptSpec
from tests.worker.user import REPOSITORY
from tools.script_overhead import commands

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.wide, pytest.mark.filterwarnings("ignore")]

# Micro-batches of two rows of 16 tokens; a rank is a micro-batch.
TOKENS = 2 * 16
STEPS = 10


@pytest.mark.parametrize("name", commands("tiny"))
def test_a_script_is_watched(name: str, tmp_path: Path) -> None:
    spec = ScriptSpec(command=commands("tiny")[name], steps=STEPS)
    request = LaunchRequest(
        spec=spec, folder=tmp_path / "launch", gpus=(), root=REPOSITORY, timeout_seconds=300, inspect=False
    )
    launch = LocalLauncher().launch(request, lambda _: None)
    assert isinstance(launch, Launch), launch
    assert len(launch.step_seconds) == STEPS
    assert launch.tokens_per_step == TOKENS * spec.gpus
    assert launch.trace
    assert len(launch.losses) == STEPS
    assert all(4 < loss < 6 for loss in launch.losses)
    exchanges = sum(row.count for row in launch.trace.rows if row.name.startswith("c10d::"))
    assert (exchanges > 0) is (name == "fsdp2")
    # A scale of 2**24 is too much for fp16.
    assert bool(launch.evidence.get("skipped_steps")) is (name == "fp16_scaler")
