"""Nodes that are lost while SLURM still waits for them: five minutes, as SLURM comes."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.conftest import Suite
from tests.slurm.test_jobs import ENDLESS
from tests.slurm.test_nightly import logs, submit
from tests.worker.user import PLAIN

pytestmark = [pytest.mark.slurm, pytest.mark.torchrun, pytest.mark.slow]

_TWICE = f"{PLAIN} --perf-launches 2 --perf-max-launches 2"


def lose(suite: Suite, node: str, how: str) -> None:
    (suite.slurm.kill_daemon if how == "daemon" else suite.slurm.kill_node)(node)


@pytest.mark.parametrize(
    ("mode", "node", "how"),
    # Each circumstance, and not with all others: a minute and a half a case.
    [
        ("packed", "n1", "daemon"),
        pytest.param("array", "n2", "daemon", marks=pytest.mark.wide),
        pytest.param("packed", "n2", "node", marks=pytest.mark.wide),
    ],
)
def test_a_night_that_loses_a_node_begins_anew_before_slurm_gives_it_up(
    light_suite: Suite, patient: Slurm, mode: str, node: str, how: str
) -> None:
    suite = light_suite
    # Where the ranks live on, the launch that runs ends well, and the next one meets the loss.
    suite.steps(ENDLESS if how == "node" else 100)
    if how == "node":  # srun waits for tasks of which it hears nothing any more: a minute, as we ask it to
        suite.set("perf_slurm_srun = --wait=15")
    (job, *_, merging), results = submit(suite, mode, options=_TWICE)
    wide = f"{job}_2" if mode == "array" else job
    suite.until(wide, lambda: suite.training("gpus2"))
    lose(suite, node, how)
    # Not the array's narrow task, which may lose its node too.
    log = results / f"nightly-{wide}.log"
    suite.until(wide, lambda: "llmperf: unfinished; requeued" in log.read_text(), 300)
    assert f"node {node} failed, and llama-tiny" in log.read_text()
    suite.steps(12)
    time.sleep(3)  # SLURM waits two minutes, and would take credentials of the requeue's second for revoked ones
    patient.give_up(node)  # until then the job waits for its old start to end there
    patient.wait(lambda: patient.job(wide)["Restarts"] == "1", 90, lambda: logs(results))
    fields = patient.ended(wide, 400)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), logs(results)
    assert patient.ended(merging, 400)["JobState"] == "COMPLETED", logs(results)
    document = json.loads((results / "merged.json").read_text())
    wide_case = next(result for result in document["results"] if "gpus2" in result["nodeid"])
    places = [launch["evidence"]["slurm_nodes"] for launch in wide_case["launches"]]
    assert len(places) == 2
    assert not any(node in place.split() for place in places), "a case that was not concluded begins anew"


def test_the_last_start_goes_on_with_what_fits_on_the_nodes_that_work(light_suite: Suite, patient: Slurm) -> None:
    suite = light_suite
    (job, merging), results = submit(suite, "packed", more="max_restarts = 0")
    suite.until(job, lambda: patient.processes(SLURM_JOB_ID=job))
    patient.kill_daemon("n2")
    suite.until(job, lambda: "llmperf: 1 GPU(s): exit code 0" in logs(results), 300)
    patient.give_up("n2")
    patient.ended(job)
    assert patient.ended(merging)["ExitCode"] == "1:0", logs(results)
    document = json.loads((results / "merged.json").read_text())
    places = {result["launches"][0]["evidence"]["slurm_nodes"] for result in document["results"]}
    assert [result["verdict"] for result in document["results"]] == ["pass"]
    assert places == {"n1"}
    assert "node n2 failed, and llama-tiny" in (results / "summary.md").read_text()


def test_a_job_of_ones_own_that_may_resume_ends_unfinished(light_suite: Suite, patient: Slurm) -> None:
    suite = light_suite
    job = suite.submit("--perf-resume")
    suite.until(job, lambda: "gpus1: launch 1/1 started" in suite.log(job))
    patient.kill_daemon("n2")
    suite.until(job, (suite.folder / f"out-{job}.json").exists)
    results = suite.results(job)
    assert results["exit_code"] == 75
    assert results["unfinished"].startswith("node n2 failed, and llama-tiny")
    assert results["1"]["verdict"] in ("pass", "inconclusive")  # a busy host is not sure
    assert "2" not in results


def test_one_that_may_not_names_the_node_and_how_to_run_it_again(light_suite: Suite, patient: Slurm) -> None:
    suite = light_suite
    job = suite.submit()
    suite.until(job, lambda: "gpus1: launch 1/1 started" in suite.log(job))
    patient.kill_daemon("n2")
    suite.until(job, (suite.folder / f"out-{job}.json").exists)
    results = suite.results(job)
    assert results["exit_code"] == 1
    assert "node-failure): node n2 did not begin" in results["2"]["reason"]
    again = "run it again: pytest "
    suite.until(job, lambda: again in suite.log(job))


def test_however_many_nodes_a_job_has_a_cpus_kind_is_the_nodes(light_suite: Suite) -> None:
    suite = light_suite
    (suite.folder / "pytest.ini").write_text("[pytest]\n")
    kinds = set()
    for nodes, tasks in ((2, 1), (1, 1), (1, 2)):
        spread = (f"--nodes={nodes}", f"--ntasks-per-node={tasks}")
        job = suite.slurm.ended(suite.submit("--perf-dry-run", sbatch=spread))["JobId"]
        document = json.loads((suite.folder / f"out-{job}.json").read_text())
        assert document["machine"]["cores"] == nodes * tasks
        kinds.add(document["machine"]["kind"])
    assert len(kinds) == 1
    assert kinds.pop().endswith(f"-{os.cpu_count()}c")
