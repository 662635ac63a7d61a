"""Options about SLURM, where there is none."""

from __future__ import annotations

import json
import time

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project
from tests.slurm.fakes import FakeSlurm


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--perf-resume"], "--perf-resume: not in a SLURM job"),
        (["--perf-budget", "2"], "--perf-budget: not in a SLURM job*--perf-dry-run*"),
        (["--perf-budget", "lots"], "expected a number of GPU-hours above 0"),
        (["--perf-launcher", "srun"], "--perf-launcher*invalid choice*"),
        (["-o", "perf_slurm_prefix='a"], "ini perf_slurm_prefix = 'a: not words of a shell"),
    ],
)
def test_what_cannot_be_is_a_usage_error(project: Project, options: list[str], said: str) -> None:
    result = project.run(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{said}*"])
    assert project.launches == []


def test_srun_outside_of_a_job_is_a_usage_error(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    result = project.run("--perf-launcher", "slurm")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--perf-launcher slurm: *"])


# What SlurmLauncher raises when a job's time or its budget is over.
_TOO_LATE = """
from unittest import mock

from pytest_llmperf.launch import local
from pytest_llmperf.launch.site import OutOfTimeError
from tests import fakes

fakes.install()

class LateLauncher(fakes.FakeLauncher):
    def launch(self, request, watch):
        if request.spec.attention == "sdpa":
            raise OutOfTimeError("sdpa was not started: SLURM job 7 is over", over_budget=OVER)
        return super().launch(request, watch)

mock.patch.object(local, "LocalLauncher", LateLauncher).start()
"""


@pytest.mark.parametrize("parallel", [(), ("-n", "2")])
@pytest.mark.parametrize(("over_budget", "code"), [(False, 75), (True, 76)])
def test_a_run_whose_time_is_over_keeps_what_is_known(
    project: Project, parallel: tuple[str, ...], over_budget: bool, code: int, golden: Golden
) -> None:
    if parallel:
        pytest.importorskip("xdist")
    project.record()
    project.pytester.makeconftest(_TOO_LATE.replace("OVER", str(over_budget)))
    result = project.run("--perf-json", "out.json", *parallel)
    assert result.ret == code
    assert "INTERNALERROR" not in result.stdout.str()
    assert "unused baseline" not in result.stdout.str(), "nobody knows"
    document = json.loads((project.path / "out.json").read_text())
    assert document["exit_code"] == code
    golden(document["unfinished"])
    if not parallel:
        assert [each["verdict"] for each in document["results"]] == ["pass"]


def test_a_job_of_several_nodes_without_srun_is_a_usage_error(
    project: Project, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """In a container without it, say: a quiet run on the first node alone is not what was asked for."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("PATH", "/nothing here")
    assert project.run("--perf-max-launches", "1").ret == pytest.ExitCode.TESTS_FAILED, "one node: all cases are new"
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "--perf-launcher auto: srun")


# The launches of a job of 8 GPUs, without the wait for real ones.
_IN_A_JOB = """
from unittest import mock

from pytest_llmperf.launch.slurm import controller as scheduler
from pytest_llmperf.launch.slurm import slurm_site as allocated
from tests import fakes

mock.patch.object(scheduler, "start_time", lambda job: START).start()
mock.patch.object(allocated, "SlurmLauncher", lambda *args, **options: fakes.FakeLauncher()).start()
"""


@pytest.mark.parametrize("parallel", [(), ("-n", "2")])
def test_what_a_job_spent_is_noted_for_its_next_start(
    project: Project, monkeypatch: pytest.MonkeyPatch, parallel: tuple[str, ...]
) -> None:
    if parallel:
        pytest.importorskip("xdist")
    slurm = FakeSlurm(project.path, monkeypatch)
    slurm.allocate({"n1": {"gpus": 4}, "n2": {"gpus": 4}})
    an_hour_ago = time.time() - 3600
    project.pytester.makeconftest(_IN_A_JOB.replace("START", repr(an_hour_ago)))
    project.run(*slurm.options, "--perf-budget", "99", *parallel, gpus="8")
    gpu_hours, until = json.loads((project.path / ".llmperf" / "jobs" / "7" / "spent-0.json").read_text())
    assert gpu_hours == pytest.approx(8 * (until - an_hour_ago) / 3600)
    assert until == pytest.approx(time.time(), abs=120)
    assert project.launches, "of this job"


def test_what_was_spent_is_noted_before_each_launch(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed in one tells nothing any more."""
    slurm = FakeSlurm(project.path, monkeypatch)
    slurm.allocate({"n1": {"gpus": 8}})
    an_hour_ago = time.time() - 3600
    killed = _IN_A_JOB + "fakes.FakeLauncher.launch = lambda *_: os.kill(os.getpid(), 9)\n"
    project.pytester.makeconftest("import os\n" + killed.replace("START", repr(an_hour_ago)))
    result = project.run(*slurm.options, gpus="8")
    assert result.ret == -9
    gpu_hours, until = json.loads((project.path / ".llmperf" / "jobs" / "7" / "spent-0.json").read_text())
    assert gpu_hours == pytest.approx(8 * (until - an_hour_ago) / 3600)
