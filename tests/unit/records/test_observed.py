"""The row that a real run leaves which was watched: read as a history has it, or refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.result import OBSERVED, PastLaunch, PastResult
from pytest_llmperf.run.history import History
from pytest_llmperf.support import codec
from tests.golden import Golden

RESULT = PastResult(
    run="observed-1",
    machine="",
    id="train-gpus1",
    digest="0123456789abcdef",
    nodeid="llmperf script --observe",
    verdict=OBSERVED,
    launches=(PastLaunch("2026-03-01T10:00:00Z", 0.25, places=(Place("host", "NVIDIA H100 80GB HBM3 uuid"),)),),
    tokens_per_step=4096,
    ranks=1,
    peak_reserved_bytes=2**30,
    observed={"steps": 120_000, "drift": 0.031, "held": 3 * 2**20},
)
GPU = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984, "cores": 26}
CPU = {"name": "AMD EPYC", "memory_bytes": 0, "cores": 2}


def leave(folder: Path, device: dict[str, Any], result: PastResult = RESULT, number: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"observed-{number}.json"
    path.write_text(json.dumps({OBSERVED: codec.plain(result), "device": device, "windows": {}, "notes": []}))
    return path


@pytest.mark.parametrize(("device", "machine"), [(GPU, "nvidia-h100-80gb-hbm3-80gib"), (CPU, "cpu-amd-epyc-2c")])
def test_a_row_is_of_the_kind_of_machine_that_runs_name(tmp_path: Path, device: dict[str, Any], machine: str) -> None:
    leave(tmp_path, device)
    assert History.read([tmp_path]).results == (replace(RESULT, machine=machine),)


def test_a_case_shows_its_real_runs_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    leave(tmp_path, GPU)
    later = (replace(RESULT.launches[0], started_at="2026-03-02T10:00:00Z", step_seconds=0.26),)
    short = replace(RESULT, launches=later, observed={"steps": 90.0}, unfinished="still running, or ended from outside")
    leave(tmp_path, GPU, short, number=2)
    assert main(["history", "train-gpus1", "--from", str(tmp_path)]) == 0
    golden(capsys.readouterr().out)


@pytest.mark.parametrize("text", ["", "{}", '{"observed": {}}', '{"observed": {"run": 1}, "device": {}}', "[]"])
def test_what_is_no_row_is_one_line(tmp_path: Path, golden: Golden, text: str) -> None:
    path = leave(tmp_path, CPU)
    path.write_text(text)
    (trouble,) = History.read([tmp_path]).troubles
    golden(trouble.partition(" (")[0])  # and the words of whatever refused it
    assert "\n" not in trouble
