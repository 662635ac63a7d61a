"""Beside other plugins: one that ends a test that takes too long, one that runs it again, one that keeps benchmarks."""

from __future__ import annotations

import json
import re

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

SLOW = """
import time

from pytest_llmperf.records.failure import Progress
from tests import fakes

fakes.install()

def launch(self, request, watch):
    logs = request.folder / "logs" / "0"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("the last words of a rank")
    watch(Progress(phase="training", step=3, steps=20))
    time.sleep(60)

fakes.FakeLauncher.launch = launch
"""

# As pytest-rerunfailures does it: each attempt has its reports, and one that another follows is a "rerun".
RERUN = """
from _pytest.runner import runtestprotocol
from tests import fakes

fakes.install()

def pytest_runtest_protocol(item, nextitem):
    for left in (1, 0):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        again = False
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            if report.failed and left:
                report.outcome, again = "rerun", True
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if not again:
            break
        item._initrequest()
    return True

def pytest_report_teststatus(report):
    if report.outcome == "rerun":
        return "rerun", "R", "RERUN"
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_timeout_of_pytest_timeout_names_case_phase_and_logs(
    project: Project, workers: tuple[str, ...], golden: Golden
) -> None:
    pytest.importorskip("pytest_timeout")
    project.pytester.makeconftest(SLOW)
    result = project.run("-k", "sdpa", "--timeout=2", "--perf-json=out.json", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    why = "launch failed (timeout): Timeout (>2.0s) from pytest-timeout, in phase training, step 3 of 20"
    result.stdout.fnmatch_lines(
        [f"llama-tiny-*-gpus1: {why}", "logs: *llama-tiny-*", "FAILED *::test_attention[[]sdpa] - *"]
    )
    golden.lines(result.stdout, "| the last", "run it again:")
    assert "subprocess" not in result.stdout.str()
    assert "plugin/runner.py" not in result.stdout.str()
    (found,) = json.loads((project.path / "out.json").read_text())["results"]
    assert (found["verdict"], found["reason"]) == ("invalid", why)


def test_the_short_summary_has_the_cause(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.fake(fail="error")
    project.run("-k", "sdpa").stdout.fnmatch_lines(["FAILED *[[]sdpa] - launch failed (error): *"])
    monkeypatch.setenv("COLUMNS", "160")
    project.fake()
    project.run("-k", "sdpa").stdout.fnmatch_lines(["FAILED *[[]sdpa] - new: no baseline *"])


class TestRunAgain:
    @pytest.fixture
    def rerun(self, project: Project) -> Project:
        project.record(step_seconds=0.1)
        project.pytester.makeconftest(RERUN)
        project.fake(step_seconds=2.0)
        return project

    @pytest.mark.parametrize("workers", [(), ("-n", "2")])
    def test_a_test_counts_once_with_all_its_launches(
        self, rerun: Project, workers: tuple[str, ...], golden: Golden
    ) -> None:
        result = rerun.run("-k", "sdpa", "--perf-json=out.json", *workers)
        result.stdout.fnmatch_lines(["1 regressed *"])
        golden.lines(result.stdout, ": the test")
        result.stdout.re_match_lines([r"=+ 1 failed.*1 rerun"])
        (found,) = json.loads((rerun.path / "out.json").read_text())["results"]
        assert (found["verdict"], len(found["launches"])) == ("regressed", len(rerun.launches))
        assert "shares" not in found

    def test_its_baseline_is_in_use_and_others_can_be_known_as_unused(self, rerun: Project) -> None:
        rerun.fake(sequence=[{"fail": "error"}, {"step_seconds": 0.1}])
        rerun.pytester.makepyfile(test_mine="def test_one(perf, train_spec):\n    perf.check(train_spec)\n")
        result = rerun.run()
        result.stdout.fnmatch_lines(["1 pass * 20* s in 2 launches: *", "unused baseline: *eager*"])
        assert result.ret == 0


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_benchmarks_that_are_not_written_are_told(project: Project, workers: tuple[str, ...]) -> None:
    pytest.importorskip("pytest_benchmark")
    result = project.run("--update-baselines", "--benchmark-json=out.json", *workers)
    result.assert_outcomes(passed=2)
    told = re.findall(r"(?m)^--benchmark-json: not written, .*leave out -n, or take --perf-json$", result.stdout.str())
    assert (len(told), (project.path / "out.json").exists()) == ((1, False) if workers else (0, True))
