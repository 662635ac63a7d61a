"""What takes several launches, several environments or several runs: retries, pruning, revisions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

FOREIGN = {"foreign_processes": ["GPU 0: pid 7 (python) holds 3.2 GiB"]}


class TestSettingAside:
    def test_a_spoilt_launch_is_tried_once_more_and_does_not_count(self, project: Project, golden: Golden) -> None:
        project.record()
        project.fake(sequence=[FOREIGN, {}])
        result = project.run("-k", "sdpa")
        result.assert_outcomes(passed=1, deselected=1)
        golden.lines(result.stdout, "one launch was")
        assert len(project.launches) == 2

    def test_one_that_stays_spoilt_is_invalid_and_never_recorded(self, project: Project) -> None:
        project.fake(**FOREIGN)
        result = project.run("-k", "sdpa", "--update-baselines", "--perf-reason", "why")
        result.assert_outcomes(failed=1, deselected=1)
        result.stdout.fnmatch_lines(["*invalid*pid 7*"])
        assert (len(project.launches), project.baselines) == (2, [])


class TestLaunches:
    def test_an_unchanged_case_takes_one(self, project: Project) -> None:
        project.record()
        project.run("-k", "sdpa").assert_outcomes(passed=1, deselected=1)
        assert len(project.launches) == 1

    def test_a_slower_one_is_confirmed_by_a_second(self, project: Project) -> None:
        project.record(step_seconds=0.1)
        project.fake(step_seconds=2.0)
        project.run("-k", "sdpa").assert_outcomes(failed=1, deselected=1)
        assert len(project.launches) == 2

    def test_all_are_pooled_and_none_saves_a_case_by_itself(self, project: Project) -> None:
        project.record(step_seconds=0.1)
        project.fake(sequence=[{"step_seconds": 3.0}, {"step_seconds": 0.1}, {"step_seconds": 3.0}])
        (result,) = project.results("-k", "sdpa").values()
        assert result["verdict"] != "pass"
        assert len(result["launches"]) == len(project.launches) >= 2

    def test_a_budget_of_one_is_kept(self, project: Project) -> None:
        project.record(step_seconds=0.1)
        project.fake(step_seconds=3.0)
        project.run("-k", "sdpa", "--perf-max-launches", "1").assert_outcomes(failed=1, deselected=1)
        assert len(project.launches) == 1

    def test_an_inconclusive_case_fails_a_strict_run_alone(self, project: Project) -> None:
        project.pytester.makeini("[pytest]\nperf_throughput_tolerance = 0.01\n")
        project.record()
        project.fake(step_seconds=0.101)
        project.run("-k", "sdpa").assert_outcomes(passed=1, deselected=1)
        result = project.run("-k", "sdpa", "--perf-strict")
        result.assert_outcomes(failed=1, deselected=1)
        result.stdout.fnmatch_lines(["*inconclusive*"])

    @pytest.mark.parametrize("alarms", ["0", "-1", "many"])
    def test_alarms_a_month_are_a_positive_number(self, project: Project, alarms: str, golden: Golden) -> None:
        project.pytester.makeini(f"[pytest]\nperf_alarms_per_month = {alarms}\n")
        result = project.run()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        golden.lines(result.stderr, "expected a number")


class TestUnused:
    ONE = "def test_one(perf, train_spec):\n    perf.check(train_spec)\n"

    def test_a_node_id_says_nothing_of_the_other_cases(self, project: Project) -> None:
        project.record()
        result = project.run("--perf-strict", "test_mine.py::test_attention[sdpa]")
        result.assert_outcomes(passed=1)
        assert "unused" not in result.stdout.str()
        assert result.ret == 0

    def test_a_run_that_stopped_early_says_nothing(self, project: Project) -> None:
        project.record()
        project.fake(fail="error")
        assert "unused" not in project.run("-x").stdout.str()

    @pytest.mark.parametrize("workers", [(), ("-n", "2")])
    def test_a_case_that_is_gone_is_named(self, project: Project, workers: tuple[str, ...]) -> None:
        project.record()
        project.pytester.makepyfile(test_mine="def test_attention(perf, train_spec):\n    perf.check(train_spec)\n")
        result = project.run("--perf-strict", *workers)
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines(["unused baseline: *eager*delete the file*"])
        assert result.ret == pytest.ExitCode.TESTS_FAILED


class TestRevision:
    @pytest.fixture
    def checkout(self, project: Project) -> Path:
        path = project.pytester.path
        for command in (
            ["init", "-q"],
            ["add", "test_mine.py", "conftest.py"],
            ["-c", "user.name=n", "-c", "user.email=e@e", "commit", "-qm", "m"],
        ):
            subprocess.run(["git", *command], cwd=path, check=True)
        return path

    def test_a_clean_tree_is_recorded_with_its_commit(self, project: Project, checkout: Path) -> None:
        project.record()
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, check=True, capture_output=True, text=True)
        document = json.loads(project.baselines[0].read_text())
        assert head.stdout.startswith(document["anchor"]["revision"])
        assert len(document["anchor"]["revision"]) == 12

    @pytest.mark.parametrize("update", ["--update-baselines=new", "--update-baselines"])
    def test_a_first_baseline_from_a_dirty_tree_is_recorded_and_marked(
        self, project: Project, checkout: Path, update: str
    ) -> None:
        project.pytester.makepyfile(test_new=TestUnused.ONE)  # the test itself is not committed yet
        result = project.run(update, "test_new.py")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["  new *  uncommitted"])
        document = json.loads(project.baselines[0].read_text())
        assert [entry["uncommitted"] for entry in (document["anchor"], *document["history"])] == [True, True]
        command = [sys.executable, "-m", "pytest_llmperf.cli", "baselines", "show", str(project.baselines[0])]
        said = ["*recorded by *::test_one, uncommitted", "* uncommitted *"]
        project.pytester.run(*command).stdout.fnmatch_lines(said)
        project.run("test_new.py").assert_outcomes(passed=1)

    def test_to_replace_from_a_dirty_tree_needs_a_reason_before_anything_is_launched(
        self, project: Project, checkout: Path, golden: Golden
    ) -> None:
        project.record()
        assert "uncommitted" not in project.baselines[0].read_text()
        (checkout / "conftest.py").write_text((checkout / "conftest.py").read_text() + "\n# changed\n")
        result = project.run("--update-baselines")
        result.assert_outcomes(failed=2)
        golden.lines(result.stdout, "the working tree")
        assert project.launches == []
        project.run("--update-baselines", "--perf-reason", "trying").assert_outcomes(passed=2)
        history = json.loads(project.baselines[0].read_text())["history"]
        assert [entry.get("uncommitted", False) for entry in history] == [False, True]


class TestLaunchesThatDisagree:
    """Of one host and day, and further apart than the tolerance: none of them is what the case takes."""

    @pytest.fixture(autouse=True)
    def _that_disagree(self, project: Project) -> None:
        project.pytester.makeini("[pytest]\nperf_throughput_tolerance = 0.02\n")
        project.fake(sequence=[{"step_seconds": 0.1}, {"step_seconds": 0.2}])

    def test_they_are_not_recorded_and_the_case_fails_with_why(self, project: Project, golden: Golden) -> None:
        result = project.run("-k", "sdpa", "--perf-launches=2", "--update-baselines")
        result.assert_outcomes(failed=1, deselected=1)
        golden.lines(result.stdout, "launches of one")
        # What was just tried is not advised again, but what would record them.
        result.stdout.fnmatch_lines(['*=new --perf-reason "why"'])
        assert (len(project.launches), project.baselines) == (2, [])

    def test_a_reason_records_them(self, project: Project, golden: Golden) -> None:
        reason = ("--perf-reason", "it is never quieter")
        result = project.run("-k", "sdpa", "--perf-launches=2", "--update-baselines", *reason)
        result.assert_outcomes(passed=1, deselected=1)
        golden.lines(result.stdout, "launches of one")
        (path,) = project.baselines
        assert json.loads(path.read_text())["anchor"]["reason"] == reason[1]

    def test_launches_that_agree_need_none(self, project: Project) -> None:
        project.fake(step_seconds=0.1)
        project.run("-k", "sdpa", "--perf-launches=2", "--update-baselines").assert_outcomes(passed=1, deselected=1)
        assert len(project.baselines) == 1


class TestResults:
    def test_a_case_that_failed_before_it_was_judged_is_in_the_results(self, project: Project) -> None:
        project.record()
        project.baselines[0].write_text("{}")
        verdicts = sorted(result["verdict"] for result in project.results().values())
        assert verdicts == ["invalid", "pass"]

    def test_one_that_a_fixture_judged_is_there_too(self, project: Project) -> None:
        project.pytester.makepyfile(
            test_mine="""
            import pytest

            @pytest.fixture
            def judged(perf, train_spec):
                return perf.check(train_spec)

            def test_it(judged):
                pass
            """
        )
        (result,) = project.results().values()
        assert result["verdict"] == "new"


class TestDryRun:
    def test_what_would_be_skipped_is_told_with_its_reason(self, project: Project) -> None:
        project.pytester.makepyfile(
            test_mine="""
            import pytest

            @pytest.mark.parametrize("liger", [False, True])
            def test_it(perf, train_spec):
                perf.check(train_spec)

            def test_gain(perf, train_spec):
                perf.compare(train_spec, train_spec)
            """
        )
        result = project.run("--perf-dry-run")
        result.assert_outcomes(skipped=3)
        result.stdout.fnmatch_lines(
            [
                "*1 launch(es) on CPU*",
                "*2 launch(es) on CPU*",
                "*skipped: llama-tiny-*liger*: Liger's*",
                "2 case(s), 3 launch(es)*",
            ]
        )
        assert project.launches == []


LOST = """
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from tests.fakes import install

install()
sys.modules["torchao"] = {module}
if sys.modules["torchao"]:
    sys.modules["torchao"].__spec__ = ModuleSpec("torchao", None)
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_case_that_ran_and_lacks_a_package_now_is_no_green_night(
    project: Project, workers: tuple[str, ...], golden: Golden
) -> None:
    project.pytester.makepyfile(
        test_mine="""
        from dataclasses import replace

        def test_it(perf, train_spec):
            perf.check(replace(train_spec, optimizer="adamw_torch_8bit"))

        def test_too_wide(perf, train_spec):
            perf.check(replace(train_spec, gpus=64))
        """
    )
    project.pytester.makeconftest(LOST.format(module='ModuleType("torchao")'))
    project.record()
    project.pytester.makeconftest(LOST.format(module="None"))
    plain = project.run(*workers, "--perf-json=out.json")
    plain.assert_outcomes(skipped=2)
    assert plain.ret == 0
    plain.stdout.fnmatch_lines(["skipped: *-gpus64: needs *"])
    golden.lines(plain.stdout, "skipped, and has")
    skipped = json.loads((project.path / "out.json").read_text())["skipped"]
    assert sorted(case["lost"] for case in skipped) == [False, True]
    assert project.run(*workers, "--perf-strict").ret == 1


def test_launches_that_are_far_apart_are_told_where_they_are_recorded(project: Project, golden: Golden) -> None:
    project.fake(sequence=[{"step_seconds": 0.1}, {"step_seconds": 0.3}])
    result = project.run("--update-baselines=new", "--perf-launches", "2", "-k", "sdpa")
    result.assert_outcomes(passed=1, deselected=1)
    golden.lines(result.stdout, "times apart")  # as a note, and where it is recorded
