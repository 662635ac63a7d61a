"""A run that is told to end, with a real torchrun below it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.worker.test_launches import processes_of

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun]

REPOSITORY = Path(__file__).parents[2]

CASES = """
from dataclasses import replace

import pytest

@pytest.mark.parametrize("steps", [8, 100_000])
def test_case(perf, train_spec, steps):
    perf.check(replace(train_spec, sequence_length=16, steps=steps, min_steps=steps, seed=steps))
"""


@pytest.mark.parametrize("parallel", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_sigterm_keeps_what_is_known_and_leaves_nobody(tmp_path: Path, parallel: list[str]) -> None:
    (tmp_path / "test_mine.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ["-m", "pytest", "-v", "-p", "no:randomly", "--gpus", "0", "--perf-max-launches", "1", *parallel]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, *words, "--perf-json", "out.json"],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if "XDIST" not in name}
            | {"PYTHONPATH": str(REPOSITORY)},
            stdout=log,
            stderr=log,
        )
        while not (begun := [*tmp_path.glob(".llmperf/*/*seed100000*/progress.json")]):
            assert run.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        run.terminate()
        code = run.wait(90)
    told, document = (tmp_path / "log").read_text(), json.loads((tmp_path / "out.json").read_text())
    assert (code, document["exit_code"], document["unfinished"]) == (2, 2, signal.SIGTERM.name), told
    assert [result["verdict"] for result in document["results"]] == ["new"]
    assert "1 new" in told
    assert "ended by SIGTERM" in told
    assert processes_of(begun[0].parent) == []
