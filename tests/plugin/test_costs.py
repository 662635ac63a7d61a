"""What a run says of GPU-hours and energy."""

from __future__ import annotations

import json

import pytest

from tests.plugin.conftest import Project

GPUS = """
from dataclasses import replace

from pytest_llmperf.launch.device import Gpu
from tests import fakes

gpus = tuple(Gpu(index=i, uuid=f"GPU-{i}", name="NVIDIA Z9", memory_bytes=2**36) for i in range(2))
fakes.MACHINE = replace(fakes.MACHINE, gpus=gpus)
fakes.install()
"""

TINY = """
import pytest

@pytest.mark.parametrize("gpus", [1, 2])
def test_width(perf, gpus, train_spec):
    perf.check(train_spec)
"""


@pytest.fixture
def with_gpus(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Two GPUs whose counters tell their energy: one sequence of 1,024 tokens in a tenth of a second."""
    monkeypatch.setenv("LLMPERF_LEASE_DIR", str(project.path / "leases"))
    project.pytester.makeconftest(GPUS)
    project.pytester.makepyfile(test_mine=TINY)
    project.fake(power_watts=512.0, by={"gpus2": {"power_watts": 1024.0}})
    return project


def measured(project: Project, *options: str) -> tuple[pytest.RunResult, dict[str, object]]:
    result = project.run("--update-baselines=new", "--perf-json=out.json", *options, gpus="2")
    return result, json.loads((project.path / "out.json").read_text())


def test_energy_is_a_metric_that_gates_nothing(with_gpus: Project) -> None:
    result, document = measured(with_gpus)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["case *energy *", "*50 mJ/token*", "*50 mJ/token*"])
    for case in document["results"]:  # type: ignore[attr-defined]
        metric = case["metrics"]["joules_per_token"]
        assert metric["value"] == pytest.approx(0.05)
        assert (metric["unit"], metric["limit"]) == ("J/token", None)


def test_energy_that_nobody_counted_is_absent(with_gpus: Project) -> None:
    with_gpus.fake()
    result, document = measured(with_gpus)
    assert "mJ/token" not in result.stdout.str()
    assert "joules_per_token" not in document["results"][0]["metrics"]  # type: ignore[index]


def test_the_run_tells_its_gpu_hours(with_gpus: Project) -> None:
    result, document = measured(with_gpus)
    result.stdout.fnmatch_lines(["* GPU-hours in launches"])
    assert set(document["cost"]) == {"gpu_hours"}  # type: ignore[call-overload]


def test_a_launch_that_failed_is_counted_in_seconds_and_in_gpu_hours(with_gpus: Project) -> None:
    with_gpus.fake(by={"gpus1": {"fail": "error"}})
    result, _ = measured(with_gpus)
    result.stdout.fnmatch_lines(["1 new, 1 invalid * 20* s in 2 launches: 10 s failed *", "0.00833 GPU-hours in *"])


def test_a_cpu_has_no_gpu_hours(project: Project) -> None:
    result = project.run("--update-baselines", "--perf-json=out.json")
    result.assert_outcomes(passed=2)
    document = json.loads((project.path / "out.json").read_text())
    assert "cost" not in document
    assert "GPU-hour" not in result.stdout.str()
