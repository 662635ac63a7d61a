"""Two sides in turns on the same hardware: ``perf.compare`` and ``--perf-against``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.golden import Golden
from tests.plugin.conftest import REPOSITORY, Project


class TestTurns:
    COMPARE = """
        from dataclasses import replace

        def test_gain(perf, train_spec):
            perf.compare(train_spec, replace(train_spec, micro_batch_size=2), {bounds})
        """

    @pytest.mark.parametrize(("bounds", "outcome"), [("throughput_at_least=1.2", "passed"), ("", "passed")])
    def test_a_gain_that_holds(self, project: Project, bounds: str, outcome: str, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.COMPARE.format(bounds=bounds))
        project.fake(by={"mbs2": {"step_seconds": 0.05}})
        result = project.run()
        result.assert_outcomes(**{outcome: 1})
        golden.lines(result.stdout, "memory 1x (1")
        assert [line.split()[0].split("-")[-2] for line in project.launches] == ["mbs1", "mbs2"]

    def test_without_a_bound_nothing_is_held_and_a_note_says_so(self, project: Project, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.COMPARE.format(bounds=""))
        result = project.run("--perf-json=out.json", "--perf-strict")
        result.assert_outcomes(passed=1)
        golden.lines(result.stdout, "-mbs1-gpus1: no bound")
        (found,) = json.loads((project.path / "out.json").read_text())["results"]
        golden(found["reason"])

    def test_one_that_does_not_fails_and_takes_turns(self, project: Project, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.COMPARE.format(bounds="throughput_at_least=30"))
        result = project.run()
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, "mbs1-gpus1: regressed: throughput")
        assert "accept it" not in result.stdout.str()
        order = [line.split()[0].split("-")[-2] for line in project.launches]
        assert order == ["mbs1", "mbs2", "mbs2", "mbs1"]

    def test_a_bound_that_is_none_is_one_line(self, project: Project, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.COMPARE.format(bounds="throughput_at_least=-1"))
        result = project.run()
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, "perf.compare: throughput_at_least=-1 must")
        assert project.launches == []

    def test_losses_of_other_batches_cannot_be_held(self, project: Project, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.COMPARE.format(bounds="loss_within=0.1"))
        result = project.run()
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, "perf.compare: loss_within needs")
        assert project.launches == []

    @pytest.mark.parametrize("bound", ["0", "'0.01'", "True", "float('inf')", "[0.01]"])
    def test_a_bound_of_the_loss_that_is_none_is_one_line(self, project: Project, bound: str, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.COMPARE.format(bounds=f"loss_within={bound}"))
        result = project.run()
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, "must be a")
        assert "Error" not in result.stdout.str()
        assert project.launches == []

    def test_a_bound_that_is_a_bool_is_one_line(self, project: Project, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.COMPARE.format(bounds="memory_at_most=True"))
        golden.lines(project.run().stdout, "perf.compare: memory_at_most=True must")
        assert project.launches == []

    @pytest.mark.parametrize("wrong", ["'a', train_spec", "train_spec, None"])
    def test_what_is_no_spec_is_one_line(self, project: Project, wrong: str, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=f"def test_it(perf, train_spec):\n    perf.compare({wrong})\n")
        result = project.run()
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, "; the fixture")
        assert "Traceback" not in result.stdout.str()
        assert project.launches == []

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            ("check()", "perf.check: missing a required argument: 'spec'; expected spec, scaled_from"),
            ("check(1, 2)", "perf.check: too many positional arguments; expected spec, scaled_from"),
            ("measure(spec=1, gpus=2)", "perf.measure: got an unexpected keyword argument 'gpus'; expected spec"),
            ("tune(1)", "perf.tune: missing a required*argument: 'over'; expected spec, over, runners_up"),
        ],
    )
    def test_other_arguments_than_a_method_has_are_one_line(self, project: Project, call: str, said: str) -> None:
        project.pytester.makepyfile(test_mine=f"def test_it(perf):\n    perf.{call}\n")
        result = project.run()
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([said])
        assert "Traceback" not in result.stdout.str()
        assert "TypeError" not in result.stdout.str()


class TestAgainst:
    @pytest.fixture
    def other(self, project: Project) -> str:
        python = project.pytester.path / "old" / "python"
        python.parent.mkdir()
        python.symlink_to(sys.executable)
        return str(python)

    def test_the_same_speed_passes_without_any_baseline(self, project: Project, other: str) -> None:
        result = project.run("-k", "sdpa", f"--perf-against={other}")
        result.assert_outcomes(passed=1, deselected=1)
        assert (len(project.launches), project.baselines) == (2, [])

    def test_each_launch_names_its_side_and_how_many_there_will_be(
        self, project: Project, other: str, golden: Golden
    ) -> None:
        result = project.run("-k", "sdpa", f"--perf-against={other}")
        lines = [line.partition("-gpus1 ")[2] for line in result.outlines if line.startswith("llmperf: llama-")]
        golden([re.sub(r"finished: .*", "finished", line) for line in lines])

    def test_further_turns_are_counted_in_pairs(self, project: Project, other: str) -> None:
        project.fake(step_seconds=2.0, by={"old/python": {"step_seconds": 0.1}})
        result = project.run("-k", "sdpa", f"--perf-against={other}")
        numbers = re.findall(r"launch (\d/\d) started", result.stdout.str())
        assert numbers[:4] == ["1/2", "2/2", "3/4", "4/4"]

    def test_what_both_sides_have_on_their_path_is_told(self, project: Project, other: str) -> None:
        result = project.run("-k", "sdpa", f"--perf-against={other}", "--perf-json=out.json")
        note = f"{REPOSITORY} comes before the packages of both environments"
        result.stdout.fnmatch_lines([f"*-gpus1: PYTHONPATH=*{note}"])
        (found,) = json.loads((project.path / "out.json").read_text())["results"]
        assert [told.endswith(note) for told in found["notes"]] == [True]

    def test_a_slower_new_environment_fails_and_names_what_differs(self, project: Project, other: str) -> None:
        project.fake(step_seconds=2.0, by={"old/python": {"step_seconds": 0.1, "versions": {"torch": "1.9"}}})
        result = project.run("-k", "sdpa", f"--perf-against={other}")
        result.assert_outcomes(failed=1, deselected=1)
        result.stdout.fnmatch_lines(["*regressed*", "*turns with*old/python*", "*torch: 1.9 -> 2.0*"])
        assert "accept it" not in result.stdout.str()

    def test_what_one_side_had_set_of_all_that_a_launch_forces_is_told(
        self, project: Project, other: str, golden: Golden
    ) -> None:
        kernels, fewer = ["flash", "math"], ["math"]
        then = {"evidence": {"found": {"sdpa_kernels": fewer}}}
        project.fake(evidence={"found": {"sdpa_kernels": kernels}}, by={"old/python": then})
        result = project.run("-k", "sdpa", f"--perf-against={other}")
        golden.lines(result.stdout, "two sides: found")

    @pytest.mark.parametrize("python", ["no/such/python", "false", "true"])
    def test_an_interpreter_that_is_none(self, project: Project, python: str) -> None:
        result = project.run(f"--perf-against={python}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*--perf-against *expected*"])
        assert len([line for line in result.stderr.lines if line.strip()]) == 1

    def test_the_same_environment_by_another_path_is_told(self, project: Project, golden: Golden) -> None:
        (project.path / "venv").symlink_to(sys.prefix)
        other = project.path / "venv" / Path(sys.executable).relative_to(sys.prefix)
        for python in (sys.executable, str(other)):
            result = project.run("-k", "sdpa", f"--perf-against={python}")
            result.assert_outcomes(passed=1, deselected=1)
            golden.lines(result.stdout, ": the same")
        assert len(project.launches) == 4

    def test_another_one_is_not(self, project: Project, other: str) -> None:
        assert "the same environment" not in project.run("-k", "sdpa", f"--perf-against={other}").stdout.str()

    @pytest.mark.parametrize("workers", [(), ("-n", "1")])
    def test_both_sides_launches_are_kept_and_counted(
        self, project: Project, other: str, workers: tuple[str, ...]
    ) -> None:
        project.fake(by={"old/python": {"step_seconds": 0.2}})
        result = project.run("-k", "sdpa", f"--perf-against={other}", "--perf-json", "out.json", *workers)
        result.stdout.fnmatch_lines(["1 * 20* s in 2 launches*"])
        (entry,) = json.loads((project.path / "out.json").read_text())["results"]
        seconds = [entry[side][0]["ranks"][0]["step_seconds"][-1] for side in ("launches_before", "launches")]
        assert seconds == [0.2, 0.1]

    def test_a_launch_that_failed_names_its_interpreter(self, project: Project, other: str, golden: Golden) -> None:
        project.fake(by={"old/python": {"fail": "error"}})
        result = project.run("-k", "sdpa", f"--perf-against={other}")
        golden.lines(result.stdout, "launch failed (error):")

    def test_a_comparison_says_that_it_stays_in_this_environment(
        self, project: Project, other: str, golden: Golden
    ) -> None:
        project.pytester.makepyfile(test_mine=TestTurns.COMPARE.format(bounds=""))
        result = project.run(f"--perf-against={other}")
        result.assert_outcomes(passed=1)
        golden.lines(result.stdout, "mbs1-gpus1: compared in")

    def test_it_records_nothing(self, project: Project, other: str) -> None:
        result = project.run(f"--perf-against={other}", "--update-baselines")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
