"""Nights of a project that is not ours: ids of its own, a width that only the test itself knows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.conftest import REPOSITORY, Suite
from tests.slurm.test_nightly import logs
from tests.worker.import_patch import LIGHT_TOO
from tests.worker.user import LIGHT, LIGHT_PATH, PLAIN

pytestmark = [pytest.mark.slurm, pytest.mark.torchrun, pytest.mark.slow, pytest.mark.wide]

_TESTS = """
import pytest
from pytest_llmperf import TrainSpec

def spec(**fields):
    return TrainSpec(model="llama-tiny", sequence_length=16, steps=8, min_steps=8, **fields)

@pytest.mark.parametrize("attention", ["sdpa"])
def test_attention(perf, attention):
    perf.check(spec(attention=attention))

def test_both_nodes(perf):
    perf.check(spec(gpus=2))

def test_three_nodes(perf):
    perf.check(spec(gpus=3))

def test_plain():
    assert True
"""
_CLUSTER = """
[cluster]
name = theirs
gpus_per_node = 1
on_cpu = yes
[sbatch]
time = 5
[suite]
gpus = 1 2
mode = {mode}
options = {plain} --perf-max-launches 1 {options}
results = results
"""


class Nights:
    """Of one project."""

    def __init__(self, suite: Suite) -> None:
        self.suite, self.slurm, self.folder = suite, suite.slurm, suite.folder
        (self.folder / "test_tiny.py").unlink()
        self.tests()

    def tests(self, *without: str) -> None:
        parts = [part for part in _TESTS.split("\n\n") if not any(name in part for name in without)]
        (self.folder / "test_theirs.py").write_text("\n\n".join(parts))

    def submit(self, mode: str, options: str, *more: str, **variables: str) -> tuple[list[str], Path, str]:
        """The jobs of a night, its folder, and what was printed."""
        (self.folder / "cluster.ini").write_text(_CLUSTER.format(mode=mode, options=options, plain=PLAIN))
        script = str(REPOSITORY / "slurm" / "nightly.sbatch")
        done = subprocess.run(
            [sys.executable, "-m", "pytest_llmperf.cli", "submit", "cluster.ini", "--script", script, *more],
            cwd=self.folder,
            env={**self.slurm.environment, "PYTHONPATH": LIGHT_PATH, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        jobs = [line.split()[1].rstrip(":") for line in lines if line.startswith("submitted")]
        results = [Path(line.removeprefix("results: ")) for line in lines if line.startswith("results: ")]
        return jobs, (results or [Path()])[0], done.stdout

    def summary(self, jobs: list[str], results: Path) -> str:
        for job in jobs:
            self.slurm.ended(job, 240)
        path = results / "summary.md"
        assert path.exists(), logs(results)
        return path.read_text()


@pytest.fixture
def nights(nodes: Slurm, tmp_path: Path) -> Nights:
    return Nights(Suite(nodes, tmp_path / "suite", light=True))


def test_each_test_runs_at_its_width_and_what_no_width_ran_or_has_is_red(nights: Nights) -> None:
    *_, told = nights.submit("packed", "", "--dry-run")
    lines = told.splitlines()
    assert lines[lines.index("2 GPU(s): 1 test(s)") + 1] == "  test_theirs.py::test_both_nodes"
    assert lines[lines.index("1 GPU(s): 1 test(s)") + 1] == "  test_theirs.py::test_attention[sdpa]"
    assert "3 GPU(s) are" in told

    jobs, results, _ = nights.submit("packed", "--update-baselines=new")
    summary = nights.summary(jobs, results)
    assert summary.startswith("# red: 2 new"), logs(results)
    assert "not judged: test_theirs.py::test_three_nodes: asks for 3 GPU(s), and the night has 1 2" in summary
    document = json.loads((results / "merged.json").read_text())
    places = {case["nodeid"]: case["launches"][0]["evidence"]["slurm_nodes"] for case in document["results"]}
    assert places == {"test_theirs.py::test_attention[sdpa]": "n1", "test_theirs.py::test_both_nodes": "n1 n2"}

    # Another night, as an array: one test is gone, and what the other holds grew, under another PYTHONPATH.
    nights.tests("test_both_nodes", "test_three_nodes")
    (nights.folder / "site").mkdir()
    (nights.folder / "site" / "sitecustomize.py").write_text(LIGHT_TOO)
    path = f"{nights.folder / 'site'}:{REPOSITORY}"
    jobs, results, _ = nights.submit("array", "--perf-strict", PYTHONPATH=path, LLMPERF_INJECT="hold=400000000")
    summary = nights.summary(jobs, results)
    assert summary.startswith("# red: 1 regressed"), logs(results)
    assert "gpus-2.json: no test asks for 2 GPU(s); leave 2 out of \\[suite\\] gpus" in summary
    assert "gpus2.json (no case of any width has its settings" in summary
    assert re.search(r"; on n[12] \|", summary), summary  # whichever is free
    assert "sources sitecustomize: none -> " in summary
    # A folder's name may be longer than what the summary has room for.
    (case,) = json.loads((results / "merged.json").read_text())["results"]
    assert f"PYTHONPATH: {LIGHT} -> {nights.folder / 'site'}" in str(case["differences"]), case
