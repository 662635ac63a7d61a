"""A real SLURM for the tests of this folder, and a suite whose tiny models train under it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.slurm.cluster import NODES, Slurm, missing, running
from tests.worker.user import LIGHT_PATH, PLAIN

# Of tiny models a second thread only waits, at full speed.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).parents[2]

# Speed means nothing here, with two nodes on the cores of one host: memory gates, and a large leak regresses.
_SUITE = """
import pytest

from pytest_llmperf import TrainSpec

@pytest.mark.parametrize("gpus", [1, 2], ids=["llama-tiny-gpus1", "llama-tiny-gpus2"])
def test_tiny(perf, gpus):
    steps = WIDE if gpus == 2 else 12
    perf.check(TrainSpec(model="llama-tiny", gpus=gpus, sequence_length=16, steps=steps, min_steps=steps))
"""

_INI = """
[pytest]
perf_throughput_tolerance = 900 %
perf_memory_tolerance = 300 %
perf_machine = cluster
"""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    why = missing()
    if why:
        pytest.skip(why)
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def ready(slurm: Slurm) -> Slurm:
    """The cluster with all its nodes idle, whatever the test before did to them, or left running."""
    for node in NODES:
        slurm.start_daemon(node)  # a job that ran on one that is gone does not end before
    slurm.end_all_jobs()
    for node in NODES:
        slurm.start_node(node)
    return slurm


@pytest.fixture
def nodes(slurm: Slurm) -> Slurm:
    return ready(slurm)


@pytest.fixture
def patient(slurm: Slurm) -> Iterator[Slurm]:
    """A SLURM that gives no node up within the test."""
    slurm.give_up_after(300)
    yield slurm
    slurm.give_up_after(10)


@dataclass(frozen=True)
class Recorded:
    """A suite with baselines of both its cases, and the job on both nodes that recorded them."""

    suite: Suite
    job: dict[str, str]


@pytest.fixture(scope="session")
def recorded(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """By one job, however many workers pytest has."""
    return _recorded(slurm, tmp_path_factory, "suite")


@pytest.fixture(scope="session")
def recorded_lightly(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The same by ranks that train a small network with plain PyTorch."""
    return _recorded(slurm, tmp_path_factory, "light suite", light=True)


def _recorded(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory, name: str, *, light: bool = False) -> Recorded:
    base = tmp_path_factory.getbasetemp()
    home = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    suite, kept = Suite(slurm, home / name, light=light), home / name / "job.json"
    with FileLock(home / f"{name}.lock"):
        if not kept.exists():
            job = ready(slurm).ended(suite.submit("--update-baselines=new"))
            assert job["JobState"] == "COMPLETED", suite.log(job["JobId"])
            kept.write_text(json.dumps(job))
    return Recorded(suite, json.loads(kept.read_text()))


@pytest.fixture
def light_suite(nodes: Slurm, recorded_lightly: Recorded, tmp_path: Path) -> Suite:
    """A suite of the test's own, with those baselines: for what becomes of ranks that SLURM or a lost node ends."""
    return copy_of(nodes, recorded_lightly, tmp_path)


def copy_of(nodes: Slurm, recorded: Recorded, folder: Path) -> Suite:
    copy = Suite(nodes, folder / "suite", light=recorded.suite.is_light)
    (copy.folder / "baselines").symlink_to(recorded.suite.folder / "baselines")
    return copy


class Suite:
    """Tests that train, in a folder that all nodes see, and the jobs that run them."""

    def __init__(self, slurm: Slurm, folder: Path, *, light: bool = False) -> None:
        self.slurm, self.folder, self.is_light = slurm, folder, light
        folder.mkdir(exist_ok=True)
        (folder / "pytest.ini").write_text(_INI)
        self.steps(12)

    def set(self, line: str) -> None:
        """Of its configuration, one line more."""
        (self.folder / "pytest.ini").write_text(f"{_INI}{line}\n")

    @property
    def python_path(self) -> str:
        """Where its jobs find this package, and where they are light their other trainer before."""
        return LIGHT_PATH if self.is_light else str(REPOSITORY)

    def steps(self, wide: int) -> None:
        """Of a launch on both nodes; another number is the same case."""
        (self.folder / "test_tiny.py").write_text(_SUITE.replace("WIDE", str(wide)))

    def submit(self, *options: str, sbatch: tuple[str, ...] = (), inject: str = "") -> str:
        """A job on both nodes that runs pytest with ``options``; its number."""
        words = ["-m", "pytest", *PLAIN.split(), "-v", "--gpus", "0", "--perf-max-launches", "1", *options]
        script = self.folder / "job.sh"
        script.write_text(
            f"#!/bin/bash\nexport PYTHONPATH={self.python_path} LLMPERF_INJECT='{inject}'\n"
            f"exec {sys.executable} {subprocess.list2cmdline(words)} --perf-json out-$SLURM_JOB_ID.json\n"
        )
        return self.slurm.sbatch(
            *("--nodes=2", "--ntasks-per-node=1", "--time=10", f"--chdir={self.folder}", "--open-mode=append"),
            *(f"--output={self.folder}/%j.log", *sbatch, str(script)),
        )

    def log(self, job: str) -> str:
        path = self.folder / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def words(self) -> str:
        """What its jobs, their steps and their nodes have said, for somebody who was not there."""
        logs = [*self.folder.rglob("*.log"), *self.folder.glob(".llmperf/*/*/node-*.json")]
        tails = ((path.relative_to(self.folder), path.read_text(errors="replace")[-2000:]) for path in logs)
        return "\n".join(f"--- {path}\n{tail}" for path, tail in tails)

    def results(self, job: str) -> dict[str, Any]:
        """What the job's --perf-json says, by case; and how the run ended."""
        values = json.loads((self.folder / f"out-{job}.json").read_text())
        return {"exit_code": values["exit_code"], "unfinished": values.get("unfinished", "")} | {
            result["nodeid"].rpartition("gpus")[2].rstrip("]"): result for result in values["results"]
        }

    def until(self, job: str, seen: Callable[[], object], seconds: float = 180.0) -> None:
        """Wait for something that the job does."""
        self.slurm.wait(
            lambda: self.slurm.nudged(job) and seen(),
            seconds,
            lambda: f"waited in vain for job {job}: {self.slurm.job(job)}\n{self.words()}",
        )

    def training(self, case: str) -> bool:
        """Whether a launch of this case trains now."""
        for path in self.folder.glob(f".llmperf/*/*{case}*/progress.json"):
            beat = json.loads(path.read_text())
            if beat["phase"] == "training" and beat["step"] > 0 and not (path.parent / "launch.json").exists():
                return True
        return False
