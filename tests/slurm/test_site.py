"""A night in a project of one's own on a real SLURM, and what is left to read where it could not be told of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import PLAIN, Suite

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
mail = a@b
"""


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def submit(suite: Suite, mail: str) -> tuple[list[str], Path]:
    """As from a project that has no checkout of ours: the job and the one that merges; the folder of results."""
    folder = suite.folder
    (folder / "my.ini").write_text(_CLUSTER.format(folder=folder, plain=PLAIN))
    program(folder / "python", f'exec {sys.executable} "$@"')
    (folder / "bin").mkdir()
    program(folder / "bin" / "mail", mail)
    environment = suite.slurm.environment
    done = subprocess.run(
        [sys.executable, "-m", "pytest_llmperf.cli", "submit", "my.ini"],
        cwd=folder,
        env={**environment, "PYTHONPATH": suite.python_path, "PATH": f"{folder}/bin:{environment['PATH']}"},
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


def test_a_green_night_that_could_not_be_mailed_is_not_completed(light_suite: Suite) -> None:
    suite = light_suite
    (job, merging), results = submit(suite, "exit 3")
    assert suite.slurm.job(job)["CPUs/Task"] == "2", "one rank has all cores of its node"
    assert ended(suite, job)[:2] == ("COMPLETED", "0:0"), (results / f"site-{job}.log").read_text()
    state, code, comment = ended(suite, merging)
    assert (state, code) == ("FAILED", "1:0")
    said = "green: 1 pass; a@b: not mailed (mail ended with exit code 3)"
    assert comment == f"Comment=llmperf: {said}"
    first, second = (results.parent / "nights.txt").read_text().splitlines()
    assert first.endswith(f"  {results.name}  submitted as {job}, to be merged by {merging}")
    assert second.endswith(f"  {results.name}  {said}")


def test_a_folder_that_became_read_only_is_told_of(light_suite: Suite) -> None:
    suite = light_suite
    (job, merging), results = submit(suite, "cat >mailed")
    results.rename(suite.folder / "before")
    results.symlink_to("/proc/self")  # where root cannot write either
    assert ended(suite, job)[:2] == ("FAILED", "0:53"), "SLURM runs nothing whose log it cannot open"
    state, code, comment = ended(suite, merging)
    assert (state, code) == ("FAILED", "1:0")
    assert "merged.json: not written" in comment
    assert "gpus-1.json: missing" in (results.parent / "nights.txt").read_text()
    assert "gpus-1.json: missing" in (suite.folder / "mailed").read_text()


def test_a_python_that_is_gone_at_night_is_told_of(light_suite: Suite) -> None:
    suite = light_suite
    (job, merging), results = submit(suite, "cat >mailed")
    (suite.folder / "python").unlink()
    assert ended(suite, job)[:2] == ("FAILED", "127:0")
    state, code, comment = ended(suite, merging)
    assert (state, code) == ("FAILED", "1:0")
    said = f"red: not merged, {suite.folder}/python cannot run llmperf merge in {suite.folder} (exit code 1)"
    assert comment == f"Comment=llmperf: {said}; {results}"
    assert (results.parent / "nights.txt").read_text().splitlines()[-1].endswith(f"  {results.name}  {said}")
    assert (suite.folder / "mailed").read_text().startswith(said)
