"""A run that is told to end, with a real torchrun below it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until
from tests.worker.test_launches import processes_of, rank_pids
from tests.worker.user import LIGHT_PATH, RESULTS, make, start

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
    told, document = ended(tmp_path, "--perf-max-launches", "1", *parallel)
    assert [result["verdict"] for result in document["results"]] == ["new"]
    assert "1 new" in told


def test_a_parallel_run_hears_it_before_its_first_result_too(tmp_path: Path) -> None:
    # One launch, and a fork server for each worker would be two.
    _, document = ended(tmp_path, "-n", "2", "-k", "100000", "-o", "perf_start=cold")
    assert document["results"] == []


def ended(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """The log and the results of a run that gets SIGTERM while the endless case trains; nobody is left of it."""
    run = start(make(folder, CASES), *options, path=LIGHT_PATH)
    try:
        launch = trains(folder, 120)
        run.terminate()
        code = run.wait(120)
        told, document = (folder / "log").read_text(), dict(json.loads((folder / RESULTS).read_text()))
        assert (code, document["exit_code"], document["unfinished"]) == (2, 2, "SIGTERM"), told
        assert "ended by SIGTERM" in told
        # A worker of xdist is killed where it takes long; then the ranks find out by themselves.
        until(lambda: not [*processes_of(launch), *ranks_of(launch)], otherwise=lambda: processes_of(launch))
        return told, document
    finally:
        run.kill()
        run.wait()
        for one in (
            one for launch in folder.glob(".llmperf/*/*") for one in [*processes_of(launch), *ranks_of(launch)]
        ):
            with suppress(psutil.Error):
                one.kill()


def ranks_of(launch: Path) -> list[psutil.Process]:
    """Also those that were forked, which have their server's command line."""
    found = []
    for pid in rank_pids(launch):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return found


def trains(folder: Path, seconds: float) -> Path:
    """The folder of the endless launch, once it trains."""
    beats = ".llmperf/*/*seed100000*/progress.json"
    until(lambda: [*folder.glob(beats)], seconds, (folder / "log").read_text)
    return next(folder.glob(beats)).parent
