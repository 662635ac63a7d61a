"""Options about SLURM, where there is none."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Project


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--perf-resume"], "--perf-resume: not in a SLURM job"),
        (["--perf-budget", "2"], "--perf-budget: not in a SLURM job"),
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
