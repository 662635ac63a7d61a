"""The nightly job as it is submitted, on a real SLURM: one allocation that shrinks, an array, and the merge."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.conftest import REPOSITORY, Recorded, Suite, copy_of, ready
from tests.slurm.test_jobs import ENDLESS
from tests.worker.user import PLAIN

pytestmark = [pytest.mark.slurm, pytest.mark.torchrun, pytest.mark.slow]

_SCRIPT = REPOSITORY / "slurm" / "nightly.sbatch"
_CLUSTER = """
[cluster]
name = nightly
gpus_per_node = 1
on_cpu = yes
[sbatch]
time = 10
[suite]
gpus = 1 2
mode = {mode}
options = {options}
results = results
{more}
"""
_ONCE = f"{PLAIN} --perf-max-launches 1"


def submit(
    suite: Suite, mode: str, inject: str = "", *, options: str = _ONCE, more: str = ""
) -> tuple[list[str], Path]:
    """The jobs that ``llmperf submit`` submitted, the merging one last; and the folder of their results.

    ``more`` are lines of ``[suite]``.
    """
    (suite.folder / "cluster.ini").write_text(_CLUSTER.format(mode=mode, options=options, more=more))
    done = subprocess.run(
        [sys.executable, "-m", "pytest_llmperf.cli", "submit", "cluster.ini", "--script", str(_SCRIPT)],
        cwd=suite.folder,
        env={**suite.slurm.environment, "PYTHONPATH": suite.python_path, "LLMPERF_INJECT": inject},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    jobs = [line.split()[1].rstrip(":") for line in lines if line.startswith("submitted")]
    return jobs, Path(lines[-1].removeprefix("results: "))


def logs(results: Path) -> str:
    return "\n".join(path.read_text() for path in results.glob("*.log"))


def test_one_allocation_goes_from_wide_to_narrow(light_suite: Suite) -> None:
    suite = light_suite
    (job, merging), results = submit(suite, "packed")
    fields = suite.slurm.ended(job)
    assert (fields["JobState"], fields["NumNodes"]) == ("COMPLETED", "1"), logs(results)
    assert suite.slurm.ended(merging)["JobState"] == "COMPLETED", logs(results)
    document = json.loads((results / "merged.json").read_text())
    places = [result["launches"][0]["evidence"]["slurm_nodes"] for result in document["results"]]
    # By their verdicts, of which a busy host may leave one open.
    assert sorted(places) == ["n1", "n1 n2"]
    assert (results / "summary.md").read_text().startswith("# green: ")


@pytest.mark.parametrize(
    ("node", "is_alive"),
    [
        pytest.param("n1", False, id="first"),
        pytest.param("n1", True, id="first lives on", marks=pytest.mark.wide),
        pytest.param("n2", False, id="second", marks=pytest.mark.wide),
    ],
)
def test_a_node_that_fails_starts_the_night_again_on_others(light_suite: Suite, node: str, is_alive: bool) -> None:
    suite = light_suite
    suite.steps(ENDLESS)
    (job, merging), results = submit(suite, "packed")
    suite.until(job, lambda: suite.training("gpus2"))
    (suite.slurm.kill_daemon if is_alive else suite.slurm.kill_node)(node)
    suite.slurm.wait(lambda: suite.slurm.job(job)["Restarts"] == "1", 90, lambda: logs(results))
    suite.steps(12)
    fields = suite.slurm.ended(job, 240)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), logs(results)
    assert suite.slurm.ended(merging)["JobState"] == "COMPLETED", logs(results)
    document = json.loads((results / "merged.json").read_text())
    places = " ".join(result["launches"][0]["evidence"]["slurm_nodes"] for result in document["results"])
    assert len(places.split()) == 3
    assert node not in places


_ONE_NIGHT = pytest.mark.xdist_group("red night")


@pytest.fixture(scope="module")
def red(slurm: Slurm, recorded_lightly: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Night:
    """A night as an array, of which both cases hold far more memory than they did; it has ended."""
    suite = copy_of(ready(slurm), recorded_lightly, tmp_path_factory.mktemp("red"))
    (wide, narrow, merging), results = submit(suite, "array", inject="hold=400000000")
    slurm.ended(merging, 240)
    return Night(slurm, wide=f"{wide}_2", narrow=f"{narrow}_1", merging=merging, results=results)


@dataclass(frozen=True)
class Night:
    """An array's jobs, and the folder of what they found."""

    slurm: Slurm
    wide: str
    narrow: str
    merging: str
    results: Path


@_ONE_NIGHT
def test_an_array_is_merged_and_a_regression_makes_it_red(red: Night) -> None:
    assert red.slurm.job(red.merging)["ExitCode"] == "1:0", logs(red.results)
    assert red.slurm.state(red.wide) == "FAILED", logs(red.results)
    assert red.slurm.state(red.narrow) == "FAILED", logs(red.results)
    summary = (red.results / "summary.md").read_text()
    assert summary.startswith("# red: 2 regressed")
    assert "gpus-2.json: pytest ended with exit code 1" in summary


@_ONE_NIGHT
def test_a_regression_ends_red(red: Night) -> None:
    assert red.slurm.job(red.wide)["ExitCode"] == "1:0", logs(red.results)
    (result,) = json.loads((red.results / "gpus-2.json").read_text())["results"]
    assert result["verdict"] == "regressed"
    assert result["reason"].startswith("peak_reserved_bytes")
