"""A night in a project of one's own on a real SLURM, and what is left to read where it could not be told of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import Suite
from tests.worker.user import PLAIN

pytestmark = [pytest.mark.slurm, pytest.mark.torchrun, pytest.mark.slow]

# Begins when the test says so, and not before.
_CLUSTER = """
[cluster]
name = site
gpus_per_node = 2
cpus_per_node = 2
on_cpu = yes
[sbatch]
time = 5
exclusive = yes
options = --begin=now+600
[suite]
gpus = 1
without = wider
options = {plain} --perf-max-launches 1
results = nights
python = {folder}/python
"""


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def submit(suite: Suite) -> tuple[list[str], Path]:
    """As from a project that has no checkout of ours: the job and the one that merges; the folder of results."""
    folder = suite.folder
    (folder / "my.ini").write_text(_CLUSTER.format(folder=folder, plain=PLAIN))
    program(folder / "python", f'exec {sys.executable} "$@"')
    done = subprocess.run(
        [sys.executable, "-m", "pytest_llmperf.cli", "submit", "my.ini"],
        cwd=folder,
        env={**suite.slurm.environment, "PYTHONPATH": suite.python_path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    jobs = [line.split()[1].rstrip(":") for line in lines if line.startswith("submitted")]
    return jobs, Path(lines[-1].removeprefix("results: "))


def ended(suite: Suite, job: str) -> tuple[str, str, str]:
    """The job's state, its exit code and what it says of itself, once it has ended."""
    fields = suite.slurm.ended(job)
    shown = suite.slurm.command("scontrol", "show", "job", job)
    comment = [line.strip() for line in shown.splitlines() if line.strip().startswith("Comment=")]
    return fields["JobState"], fields["ExitCode"], "".join(comment)


def standing(suite: Suite) -> str:
    """What `llmperf nights` says of the only one."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest_llmperf.cli", "nights", "nights"],
        cwd=suite.folder,
        env={**suite.slurm.environment, "PYTHONPATH": suite.python_path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip().split("  ", 2)[2]


def test_a_night_says_where_it_stands_and_how_it_went(light_suite: Suite) -> None:
    suite = light_suite
    (job, merging), results = submit(suite)
    assert standing(suite).startswith(f"not merged yet: {job} PENDING (")
    assert suite.slurm.job(job)["CPUs/Task"] == "2", "one rank has all cores of its node"
    assert ended(suite, job)[:2] == ("COMPLETED", "0:0"), (results / f"site-{job}.log").read_text()
    assert ended(suite, merging) == ("COMPLETED", "0:0", f"Comment=llmperf: green: 1 pass; {results}")
    assert standing(suite) == "green: 1 pass"


def test_a_folder_that_became_read_only_is_told_of(light_suite: Suite) -> None:
    suite = light_suite
    (job, merging), results = submit(suite)
    results.rename(suite.folder / "before")
    results.symlink_to("/proc/self")  # where root cannot write either
    assert ended(suite, job)[:2] == ("FAILED", "0:53"), "SLURM runs nothing whose log it cannot open"
    state, code, comment = ended(suite, merging)
    assert (state, code) == ("FAILED", "1:0")
    assert "red: not merged, llmperf merge ended with exit code 1" in comment


def test_a_python_that_is_gone_at_night_is_told_of(light_suite: Suite) -> None:
    suite = light_suite
    (job, merging), results = submit(suite)
    (suite.folder / "python").unlink()
    assert ended(suite, job)[:2] == ("FAILED", "127:0")
    said = f"red: not merged, {suite.folder}/python cannot run llmperf merge in {suite.folder}"
    assert ended(suite, merging) == ("FAILED", "1:0", f"Comment=llmperf: {said}; {results}")
    assert standing(suite) == said
