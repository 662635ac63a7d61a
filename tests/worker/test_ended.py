"""A run that is told to end, with a real torchrun below it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.worker.test_launches import processes_of
from tests.worker.user import RESULTS, make, start

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun]

CASES = """
from dataclasses import replace

import pytest

@pytest.mark.parametrize("steps", [8, 100_000])
def test_case(perf, train_spec, steps):
    perf.check(replace(train_spec, sequence_length=16, steps=steps, min_steps=steps, seed=steps))
"""


@pytest.mark.parametrize("parallel", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_sigterm_keeps_what_is_known_and_leaves_nobody(tmp_path: Path, parallel: list[str]) -> None:
    run = start(make(tmp_path, CASES), "--perf-max-launches", "1", *parallel)
    try:
        launch = trains(tmp_path, 120)
        run.terminate()
        code = run.wait(120)
        told, document = (tmp_path / "log").read_text(), json.loads((tmp_path / RESULTS).read_text())
        assert (code, document["exit_code"], document["unfinished"]) == (2, 2, "SIGTERM"), told
        assert [result["verdict"] for result in document["results"]] == ["new"]
        assert "1 new" in told
        assert "ended by SIGTERM" in told
        # A worker of xdist is killed where it takes long; then the ranks find out by themselves.
        deadline = time.monotonic() + 60
        while processes_of(launch):
            assert time.monotonic() < deadline, processes_of(launch)
            time.sleep(0.2)
    finally:
        run.kill()
        run.wait()
        for left in (process for folder in tmp_path.glob(".llmperf/*/*") for process in processes_of(folder)):
            with suppress(psutil.Error):
                left.kill()


def trains(folder: Path, seconds: float) -> Path:
    """The folder of the endless launch, once it trains."""
    deadline = time.monotonic() + seconds
    while not (begun := [*folder.glob(".llmperf/*/*seed100000*/progress.json")]):
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.2)
    return begun[0].parent
