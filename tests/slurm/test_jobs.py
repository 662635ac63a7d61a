"""Jobs on a real SLURM with two nodes on this host: tiny models over gloo, and everything that can end a job."""

from __future__ import annotations

import os
import re
import time

import psutil
import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.conftest import Recorded, Suite

pytestmark = [pytest.mark.slurm, pytest.mark.torchrun, pytest.mark.slow]

ENDLESS = 100_000


@pytest.mark.parametrize(
    "kind", ["recorded_lightly", pytest.param("recorded", marks=pytest.mark.wide)], ids=["light", "as users train"]
)
def test_a_green_job_ran_each_case_on_the_nodes_it_needs(kind: str, request: pytest.FixtureRequest) -> None:
    recorded: Recorded = request.getfixturevalue(kind)
    suite, job = recorded.suite, recorded.job
    log, results = suite.log(job["JobId"]), suite.results(job["JobId"])
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log
    places = {case: results[case]["launches"][0]["evidence"]["slurm_nodes"] for case in "12"}
    assert places == {"1": "n1", "2": "n1 n2"}
    assert {results[case]["launches"][0]["evidence"]["start"] for case in "12"} == {"warm"}
    assert {results[case]["verdict"] for case in "12"} == {"new"}  # what others judge by it


def test_workers_of_xdist_share_the_nodes(light_suite: Suite) -> None:
    suite = light_suite
    # Cold, which on nodes no other test's launches are.
    job = suite.slurm.ended(suite.submit("-n", "2", "-o", "perf_start=cold"))
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), suite.log(job["JobId"])
    results = suite.results(job["JobId"])
    assert {results[case]["verdict"] for case in "12"} == {"pass"}
    assert results["2"]["launches"][0]["evidence"]["slurm_nodes"] == "n1 n2"
    assert {results[case]["launches"][0]["evidence"]["start"] for case in "12"} == {"cold"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a CPU's ranks are no more than its cores")
def test_a_job_may_keep_its_launches_on_its_first_node(light_suite: Suite) -> None:
    suite = light_suite
    suite.steps(ENDLESS)
    job = suite.submit("--perf-launcher", "local", "-n", "2")
    suite.until(job, lambda: suite.training("gpus2"))
    suite.slurm.command("scancel", job)
    suite.slurm.ended(job)
    suite.until(job, (suite.folder / f"out-{job}.json").exists)
    assert suite.results(job)["unfinished"] == "SIGTERM"
    assert suite.slurm.processes(SLURM_JOB_ID=job) == []


def test_a_node_that_dies_is_named_and_costs_one_case(light_suite: Suite) -> None:
    suite = light_suite
    suite.steps(ENDLESS)
    job = suite.submit("-k", "gpus2", sbatch=("--no-kill",))
    suite.until(job, lambda: suite.training("gpus2"))
    suite.slurm.kill_node("n2")
    fields = suite.slurm.ended(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "1:0"), suite.log(job)
    result = suite.results(job)["2"]
    assert "node-failure" in result["reason"]
    assert "node n2 went silent" in result["reason"]


def test_a_node_that_dies_is_left_out_and_the_launch_tried_once_more(light_suite: Suite) -> None:
    suite = light_suite
    suite.steps(200)
    job = suite.submit("-k", "gpus2", sbatch=("--nodes=3", "--no-kill"))
    suite.until(job, lambda: suite.training("gpus2"))
    suite.slurm.kill_node("n2")
    fields = suite.slurm.ended(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), suite.log(job)
    assert suite.results(job)["2"]["launches"][0]["evidence"]["slurm_nodes"] == "n1 n3"
    assert "node n2 went silent" in suite.log(job)
    assert "tried once more without n2" in suite.log(job)


def test_a_node_that_slurm_gives_up_is_named_and_not_the_one_whose_ranks_it_ends(light_suite: Suite) -> None:
    suite = light_suite
    suite.steps(ENDLESS)
    job = suite.submit("-k", "gpus2", sbatch=("--nodes=3", "--no-kill"))
    suite.until(job, lambda: suite.training("gpus2"))
    suite.slurm.kill_daemon("n2")
    suite.until(job, lambda: "tried once more" in suite.log(job))
    assert "node n2 was given up (SLURM: down" in suite.log(job), suite.log(job)
    assert "tried once more without n2" in suite.log(job)
    suite.until(job, lambda: suite.training("gpus2-1-again"))
    assert {path.name for path in suite.folder.glob(".llmperf/*/*-again/node-*")} == {"node-n1.json", "node-n3.json"}
    suite.slurm.command("scancel", job)
    suite.slurm.ended(job)


def test_a_rank_that_hangs_is_told_with_its_stack(light_suite: Suite) -> None:
    suite = light_suite
    suite.steps(ENDLESS)
    start = time.monotonic()
    job = suite.slurm.ended(suite.submit("-k", "gpus2", "--perf-timeout", "40", inject="hang=5 rank=1"))
    assert time.monotonic() - start < 150
    log = suite.log(job["JobId"])
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "1:0"), log
    reason = suite.results(job["JobId"])["2"]["reason"]
    assert re.search(r"timeout.*rank 1 in _hang \(training\.py:\d+\); rank 0 in ", reason), reason
    assert "pytest_llmperf/observe/training.py" in log, "the hanging rank's stack"
    assert suite.slurm.processes(SLURM_JOB_ID=job["JobId"]) == []


def test_a_rank_that_cannot_answer_is_named_with_its_node(light_suite: Suite) -> None:
    suite = light_suite
    suite.steps(ENDLESS)
    job = suite.submit("-k", "gpus2", "--perf-timeout", "40")
    suite.until(job, lambda: suite.training("gpus2"))
    (file,) = suite.folder.glob(".llmperf/*/*gpus2*/rank-1.pid")
    rank = psutil.Process(int(file.read_text()))
    node = rank.environ()["SLURMD_NODENAME"]
    rank.suspend()
    suite.slurm.ended(job)
    reason = suite.results(job)["2"]["reason"]
    assert re.search(rf"timeout.*: rank 1 on node {node} did not answer \(stopped\); rank 0 in ", reason), reason
    assert suite.slurm.processes(SLURM_JOB_ID=job) == []


def test_a_time_limit_that_is_near_starts_nothing_more(light_suite: Suite) -> None:
    suite = light_suite
    job = suite.slurm.ended(suite.submit(sbatch=("--time=1",)))
    log, results = suite.log(job["JobId"]), suite.results(job["JobId"])
    # Of 60 s 30 are kept for the end, and a launch that nobody has seen is taken to need more than what is left.
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "75:0"), log
    assert "reaches its time limit" in results["unfinished"]
    assert "was not started" in log
    assert results["exit_code"] == 75


def test_scancel_keeps_what_is_known_and_leaves_nobody(light_suite: Suite) -> None:
    suite = light_suite
    suite.steps(ENDLESS)
    job = suite.submit()
    suite.until(job, lambda: suite.training("gpus2"))
    suite.slurm.command("scancel", job)
    fields = suite.slurm.ended(job)
    assert fields["JobState"] == "CANCELLED"
    suite.until(job, (suite.folder / f"out-{job}.json").exists)
    results = suite.results(job)
    assert results["unfinished"] == "SIGTERM"
    assert results["1"]["verdict"] == "pass"
    assert suite.slurm.processes(SLURM_JOB_ID=job) == []


def test_a_requeued_job_goes_on_where_it_was(light_suite: Suite) -> None:
    suite = light_suite
    suite.steps(ENDLESS)
    job = suite.submit("--perf-resume", sbatch=("--requeue",))
    suite.until(job, lambda: suite.training("gpus2"))
    first = suite.folder / ".llmperf"
    launched = sorted(path.name for path in first.glob("*/*gpus1*"))
    suite.slurm.command("scontrol", "requeue", job)
    suite.slurm.wait(lambda: suite.slurm.job(job)["Restarts"] == "1", 150, lambda: suite.log(job))
    suite.steps(12)
    fields = suite.slurm.ended(job, 240)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), suite.log(job)
    results = suite.results(job)
    assert "concluded before the job was requeued" in results["1"]["notes"]
    assert "notes" not in results["2"] or "concluded" not in str(results["2"]["notes"])
    assert sorted(path.name for path in first.glob("*/*gpus1*")) == launched, "it was launched again"


def test_two_jobs_at_once_do_not_meet(light_suite: Suite) -> None:
    suite = light_suite
    both = [suite.submit("-k", "gpus1", sbatch=("--nodes=1",)) for _ in range(2)]
    for job in both:
        assert suite.slurm.ended(job)["JobState"] == "COMPLETED", suite.log(job)
        # Two jobs on two busy cores may be too noisy to decide.
        assert suite.results(job)["1"]["verdict"] in ("pass", "inconclusive")
    assert len([*suite.folder.glob(".llmperf/2*-*-*-*")]) == 2


@pytest.mark.wide
def test_a_controller_that_restarts_costs_no_case(light_suite: Suite, patient: Slurm) -> None:
    # On a loaded host nodes answer a controller that is back after more than ten seconds, and would be given up.
    suite, slurm = light_suite, patient
    suite.steps(300)
    job = suite.submit("-k", "gpus2", "--perf-launches", "2", "--perf-max-launches", "2")
    suite.until(job, lambda: suite.training("gpus2"))
    slurm.kill_controller()
    try:
        deadline = time.monotonic() + 60
        while "launch 2/2 started" not in suite.log(job):  # its step finds no controller
            assert time.monotonic() < deadline, suite.log(job)
            time.sleep(0.2)
        time.sleep(5)
    finally:
        slurm.start_controller()
    fields = slurm.ended(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), suite.log(job)
    # A controller that comes back may requeue the job itself: what was measured counts, and srun need not have failed.
    assert "started nothing" in suite.log(job) or fields["Restarts"] != "0"
    result = suite.results(job)["2"]
    assert (result["verdict"], len(result["launches"])) == ("pass", 2)
