"""A run inside a SLURM job whose nodes fail, whose time ends, and that begins anew; SLURM's commands are scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from tests.golden import Golden
from tests.plugin.conftest import Project
from tests.slurm.fakes import FakeSlurm

SPEC = TrainSpec(model="llama-tiny", gpus=2, sequence_length=16)
_TEST = """
from pytest_llmperf import TrainSpec

def test_mine(perf):
    perf.check(TrainSpec(model="llama-tiny", gpus=2, sequence_length=16))
"""


class Job:
    """A job of two nodes, and what it runs."""

    def __init__(self, project: Project, slurm: FakeSlurm) -> None:
        self.project, self.slurm = project, slurm
        slurm.allocate({"n1": {}, "n2": {}})
        slurm.yields(SPEC)

    def run(self, *options: str) -> pytest.RunResult:
        # Not by pytester, whose folders make other arguments of each run, and another run of them.
        words = [*self.slurm.options, "--perf-json", "out.json", *options]
        return self.project.pytester.run(sys.executable, "-mpytest", "-p", "no:randomly", "--gpus", "0", *words)

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.project.path / "out.json").read_text())
        return document

    @property
    def launches(self) -> int:
        """That srun has started so far."""
        return sum("pytest_llmperf.worker" in words for words in self.slurm.calls)


@pytest.fixture
def job(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    home = tmp_path / "slurm"
    home.mkdir()
    project.pytester.makepyfile(test_mine=_TEST)
    return Job(project, FakeSlurm(home, monkeypatch))


DEAD: dict[str, dict[str, object]] = {"n1": {}, "n2": {"dead": True}}


def test_a_lost_node_leaves_the_run_unfinished_where_another_start_can_go_on(job: Job, golden: Golden) -> None:
    job.slurm.plan(nodes=DEAD)
    result = job.run("--perf-resume")
    assert result.ret == 75
    assert job.document["exit_code"] == 75
    golden(job.document["unfinished"])
    assert job.document["results"] == []
    assert "launch 1/1 started" not in result.stdout.str()


def test_where_none_can_the_case_is_red_and_not_skipped(job: Job) -> None:
    job.slurm.plan(nodes=DEAD)
    result = job.run()
    assert result.ret == 1
    (case,) = job.document["results"]
    assert (case["verdict"], "(n2 failed)" in case["reason"]) == ("invalid", True)


def test_without_any_node_left_the_run_is_unfinished_too(job: Job, golden: Golden) -> None:
    job.slurm.plan(nodes={"n1": {"dead": True}, "n2": {"dead": True}})
    result = job.run("--perf-resume")
    assert result.ret == 75
    golden.lines(result.stdout.str() + result.stderr.str(), "node n1, n2")
    assert job.run().ret == 4


def test_nodes_that_answer_and_have_no_python_are_a_mistake(job: Job) -> None:
    job.slurm.python.unlink()
    result = job.run("--perf-resume")
    assert result.ret == 4
    assert "no node answered a step that asked what it is" in result.stdout.str() + result.stderr.str()


def test_a_launch_for_which_no_time_is_left_is_not_said_to_have_started(job: Job) -> None:
    job.slurm.plan(seconds_left=50)
    result = job.run("--perf-resume")
    assert result.ret == 75
    assert "was not started" in result.stdout.str()
    assert "launch 1/1 started" not in result.stdout.str()
