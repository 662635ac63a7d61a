"""A user's own command under a real SLURM: it runs on one node of the job, and what needs more is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.conftest import Suite
from tests.worker.scripted import loop
from tests.worker.user import QUICK

pytestmark = [pytest.mark.slurm, pytest.mark.torchrun, pytest.mark.slow]

_TESTS = """
import pytest

@pytest.mark.parametrize("gpus", [1, 2], ids=["gpus1", "gpus2"])
def test_script(perf, gpus):
    command, quick = "bash -c 'python train.py && touch {out}'", {"PYTHONPATH": "{quick}"}
    perf.script(command, gpus=gpus, steps=6, warmup_steps=2, env=quick)
"""


def test_a_script_runs_on_a_node_of_the_job_and_is_ended_there(nodes: Slurm, tmp_path: Path) -> None:
    suite, out = Suite(nodes, tmp_path / "suite", light=True), tmp_path / "uploaded"
    loop(suite.folder)
    (suite.folder / "test_tiny.py").write_text(_TESTS.replace("{out}", str(out)).replace("{quick}", str(QUICK)))
    job = suite.submit("--update-baselines=new")
    nodes.ended(job)
    results, log = suite.results(job), suite.log(job)
    assert results["1"]["verdict"] == "new", log
    assert results["1"]["launches"][0]["evidence"]["slurm_nodes"] in {"n1", "n2"}
    assert not out.exists()
    assert nodes.processes(SLURM_JOB_ID=job) == []
    assert "needs 2 nodes: a script's own command starts its ranks on one node" in log
    assert "WANDB_MODE=offline" in log


def test_a_soak_on_the_nodes_of_a_job_ends_with_its_minutes(nodes: Slurm, tmp_path: Path) -> None:
    suite = Suite(nodes, tmp_path / "suite", light=True)
    job = suite.slurm.ended(suite.submit("--perf-soak", "0.2"))
    log, results = suite.log(job["JobId"]), suite.results(job["JobId"])
    for ranks in "12":
        found = results[ranks]["soak"]
        assert "ended after" not in results[ranks]["reason"], log
        assert found["seconds"] == pytest.approx(12, abs=3)
        assert found["environment"]["versions"]["torch"]
    assert suite.slurm.processes(SLURM_JOB_ID=job["JobId"]) == []
