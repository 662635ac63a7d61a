"""Options about SLURM, where there is none."""

from __future__ import annotations

import json

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--perf-resume"], "--perf-resume: not in a SLURM job"),
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


# What SlurmLauncher raises when a job's time is over.
_TOO_LATE = """
from unittest import mock

from pytest_llmperf.launch import local
from pytest_llmperf.launch.site import OutOfTimeError
from tests import fakes

fakes.install()

class LateLauncher(fakes.FakeLauncher):
    def launch(self, request, watch):
        if request.spec.attention == "sdpa":
            raise OutOfTimeError("sdpa was not started: SLURM job 7 is over")
        return super().launch(request, watch)

mock.patch.object(local, "LocalLauncher", LateLauncher).start()
"""


@pytest.mark.parametrize("parallel", [(), ("-n", "2")])
def test_a_run_whose_time_is_over_keeps_what_is_known(
    project: Project, parallel: tuple[str, ...], golden: Golden
) -> None:
    if parallel:
        pytest.importorskip("xdist")
    project.record()
    project.pytester.makeconftest(_TOO_LATE)
    result = project.run("--perf-json", "out.json", *parallel)
    assert result.ret == 75
    assert "INTERNALERROR" not in result.stdout.str()
    assert "unused baseline" not in result.stdout.str(), "nobody knows"
    document = json.loads((project.path / "out.json").read_text())
    assert document["exit_code"] == 75
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
