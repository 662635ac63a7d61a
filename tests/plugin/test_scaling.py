"""Several GPUs: efficiency over the narrowest width, floors, and one measurement for tests that ask for the same."""

from __future__ import annotations

import json
import sys

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

WIDTHS = """
import pytest

@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_width(perf, train_spec):
    perf.check(train_spec)
"""

FLOOR = """
import pytest

@pytest.mark.perf_scaling(efficiency_at_least={floor})
@pytest.mark.parametrize("gpus", [1, 2])
def test_width(perf, train_spec):
    perf.check(train_spec)
"""


@pytest.fixture
def widths(project: Project) -> Project:
    """One, two and four GPUs, and a tolerance that such steady figures deserve."""
    project.pytester.makepyfile(test_mine=WIDTHS)
    project.pytester.makeini("[pytest]\nperf_throughput_tolerance = 0.05\n")
    return project


def by_gpus(number: int, **values: float) -> dict[str, dict[str, float]]:
    return {f"gpus{number}": values}


def test_each_width_shows_its_efficiency(widths: Project, golden: Golden) -> None:
    widths.record(by=by_gpus(2, step_seconds=0.11) | by_gpus(4, step_seconds=0.125))
    results = widths.results()
    one, two, four = (results[f"llama-tiny-bf16-sdpa-seq64-mbs1-gpus{gpus}"] for gpus in (1, 2, 4))
    assert "scaling_efficiency" not in one["metrics"]
    assert two["metrics"]["scaling_efficiency"]["value"] == pytest.approx(1 / 1.1)
    metric = four["metrics"]["scaling_efficiency"]
    assert metric["value"] == metric["baseline"] == pytest.approx(0.8)
    golden(metric["detail"])
    assert four["metrics"]["speed_up"]["value"] == pytest.approx(3.2)
    assert four["metrics"]["global_batch_tokens"]["value"] == 4 * 64
    result = widths.run()
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["case *tokens/s/GPU *efficiency *", "*gpus4 *80.0 % *"])


def test_a_loss_of_the_wide_case_alone_is_named(widths: Project, golden: Golden) -> None:
    widths.record()
    widths.fake(by=by_gpus(4, step_seconds=0.2))
    result = widths.run()
    result.assert_outcomes(passed=2, failed=1)
    golden.lines(result.stdout, ", scaling_efficiency 0.5,")
    result.stdout.fnmatch_lines(["*scaling efficiency *50.0 % *100.0 % *regressed*"])


def test_a_loss_of_every_width_is_not_scaling(widths: Project, golden: Golden) -> None:
    widths.record()
    widths.fake(step_seconds=0.2)
    result = widths.run("-k", "4 or 1")
    result.assert_outcomes(failed=2, deselected=1)
    golden.lines(result.stdout, "scaling efficiency: over")


def test_a_faster_single_gpu_fails_no_wide_case(widths: Project) -> None:
    widths.pytester.makeini("[pytest]\n")
    widths.record()
    widths.fake(by=by_gpus(1, step_seconds=0.01))
    results = widths.results()
    assert [result["verdict"] for result in results.values()] == ["improved", "pass", "pass"]
    efficiencies = [results[case]["metrics"]["scaling_efficiency"]["value"] for case in list(results)[1:]]
    assert efficiencies == pytest.approx([0.1, 0.1])


def test_without_the_narrow_width_its_baseline_serves(widths: Project, golden: Golden) -> None:
    widths.record()
    widths.fake(step_seconds=0.11)
    (result,) = widths.results("-k", "4").values()
    metric = result["metrics"]["scaling_efficiency"]
    assert metric["value"] == pytest.approx(1 / 1.1)
    golden(metric["detail"])
    assert len(widths.launches) == len(result["launches"])


@pytest.mark.parametrize(("floor", "failed"), [(0.5, 0), (0.95, 1)])
def test_a_floor_is_held_without_a_baseline_of_it(project: Project, floor: float, failed: int, golden: Golden) -> None:
    project.pytester.makepyfile(test_mine=FLOOR.format(floor=floor))
    project.fake(by=by_gpus(2, step_seconds=0.2 if failed else 0.11))
    result = project.run("--update-baselines=new", "--perf-launches=2")
    result.assert_outcomes(passed=2 - failed, failed=failed)
    if failed:
        golden.lines(result.stdout, "gpus2: regressed: scaling_efficiency")
        assert len(project.baselines) == 1


def test_a_wide_case_alone_that_asks_for_no_floor_is_judged_by_itself(project: Project) -> None:
    project.pytester.makepyfile(test_mine=WIDTHS)
    project.run("-k", "2", "--update-baselines=new").assert_outcomes(passed=1, deselected=2)
    (result,) = project.results("-k", "2").values()
    assert result["verdict"] == "pass"


def test_a_floor_without_anything_to_hold_it_over_is_not_a_pass(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(test_mine=FLOOR.format(floor=0.5))
    first = project.run("-k", "2", "--update-baselines=new")
    first.assert_outcomes(passed=1, deselected=1)
    golden.lines(first.stdout, "so its floor")
    (result,) = project.results("-k", "2").values()
    assert result["verdict"] == "inconclusive"
    golden(result["reason"])
    project.run("-k", "2", "--perf-strict").assert_outcomes(failed=1, deselected=1)


@pytest.mark.parametrize(("floor", "failed"), [(0.5, 0), (0.95, 1)])
def test_a_floor_holds_in_turns_with_another_environment_too(
    project: Project, floor: float, failed: int, golden: Golden
) -> None:
    project.pytester.makepyfile(test_mine=FLOOR.format(floor=floor))
    project.fake(by=by_gpus(2, step_seconds=0.2 if failed else 0.11))
    result = project.run(f"--perf-against={sys.executable}")
    result.assert_outcomes(passed=2 - failed, failed=failed)
    if failed:
        golden.lines(result.stdout, "gpus2: regressed: scaling_efficiency")


def test_in_turns_a_stored_width_is_none_to_hold_a_floor_over(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(test_mine=FLOOR.format(floor=0.5))
    project.record()
    (result,) = project.results("-k", "2", f"--perf-against={sys.executable}").values()
    assert result["verdict"] == "inconclusive"
    golden.lines(result["reason"], "no narrower width")


@pytest.mark.parametrize("mark", [True, False])
def test_a_run_knows_whether_cases_are_held_by_others_launches(project: Project, mark: bool) -> None:
    case = FLOOR.format(floor=0.1).replace("train_spec)", "train_spec, pytestconfig)", 1)
    case = case if mark else case.replace("@pytest.mark.perf_scaling", "#")
    look = f"assert session_of(pytestconfig).has_floors is {mark}"
    project.pytester.makepyfile(test_mine=f"from pytest_llmperf.plugin.hooks import session_of\n{case}    {look}\n")
    project.run("--update-baselines").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("perf_scaling(0.9)", "perf_scaling(0.9): must be given by name: efficiency_at_least=*"),
        ("perf_scaling(efficiency=0.9)", "perf_scaling(efficiency=0.9): unknown (did you mean 'efficiency_at_least'*"),
        ("perf_scaling(efficiency_at_least=-1)", "perf_scaling(efficiency_at_least=-1): must be a positive fraction*"),
    ],
)
def test_a_misused_marker_is_one_line(project: Project, mark: str, said: str) -> None:
    project.pytester.makepyfile(
        test_mine=f"import pytest\n\n@pytest.mark.{mark}\ndef test_it(perf, train_spec):\n    perf.check(train_spec)\n"
    )
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*test_it: marker {said}"])


STRONG = """
from dataclasses import replace

import pytest

@pytest.mark.parametrize("gpus", [1, 2])
def test_strong(perf, train_spec, gpus):
    one = replace(train_spec, gpus=1, micro_batch_size=4)
    perf.check(replace(one, gpus=gpus, micro_batch_size=4 // gpus), scaled_from=one)
"""


def test_widths_that_share_a_batch_say_what_they_are_scaled_from(project: Project) -> None:
    project.pytester.makepyfile(test_mine=STRONG)
    project.fake(by=by_gpus(2, step_seconds=0.0625))
    metrics = project.results()["llama-tiny-bf16-sdpa-seq64-mbs2-gpus2"]["metrics"]
    assert metrics["scaling_efficiency"]["value"] == pytest.approx(0.8)
    assert metrics["global_batch_tokens"]["value"] == 4 * 64


def test_what_it_is_scaled_from_has_fewer_gpus(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(
        test_mine="""
        from dataclasses import replace

        def test_it(perf, train_spec):
            perf.check(train_spec, scaled_from=replace(train_spec, gpus=2))
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    golden.lines(result.stdout, "-gpus2 has no")


def test_what_it_is_scaled_from_trains_alike(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(
        test_mine="""
        from dataclasses import replace

        def test_it(perf, train_spec):
            perf.check(replace(train_spec, gpus=2), scaled_from=replace(train_spec, sequence_length=32))
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    golden.lines(result.stdout, "-gpus2 has sequence_length=64,")
    assert project.launches == []


class TestShared:
    TWO = """
        import pytest

        @pytest.mark.rung(number="15.9")
        def test_one(perf, train_spec):
            perf.check(train_spec)

        {mark}
        def test_another(perf, train_spec):
            perf.check(train_spec)
        """

    def test_two_tests_of_one_case_share_its_launches(self, project: Project, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.TWO.format(mark="@pytest.mark.perf_scaling(tolerance=0.1)"))
        result = project.run("--update-baselines", "--perf-json", "out.json")
        result.assert_outcomes(passed=2)
        assert len(project.launches) == 1
        result.stdout.fnmatch_lines(["1 new (2 tests of *"])
        golden.lines(result.stdout, "its launches are")
        project.fake(step_seconds=10.0)
        project.run().assert_outcomes(failed=2)
        assert len(project.launches) == 1 + 2  # an alarm needs two

    def test_what_one_recorded_excuses_no_floor_of_the_other(self, project: Project) -> None:
        project.pytester.makepyfile(
            test_mine=FLOOR.format(floor=0.95).replace("@pytest.mark.perf_scaling(efficiency_at_least=0.95)\n", "")
            + FLOOR.format(floor=0.95).replace("test_width", "test_floor")
        )
        project.fake(by=by_gpus(2, step_seconds=0.2))
        result = project.run("--update-baselines=new", "-p", "no:randomly")
        result.assert_outcomes(passed=3, failed=1)
        result.stdout.fnmatch_lines(["*gpus2: regressed: scaling_efficiency 0.5*"])

    def test_each_judges_them_by_its_own_tolerance(self, project: Project) -> None:
        project.pytester.makepyfile(test_mine=self.TWO.format(mark="@pytest.mark.perf_tolerance(throughput=0.5)"))
        project.run("--update-baselines=new", "--perf-launches=2").assert_outcomes(passed=2)
        assert len(project.launches) == 2
        project.fake(step_seconds=0.25)
        result = project.run("--perf-launches=2")
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(["*test_another*", "*regressed: tokens_per_second_per_gpu *"])
        assert len(project.launches) == 2 + 2

    def test_what_is_not_decided_for_one_is_launched_again(self, project: Project, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.TWO.format(mark="@pytest.mark.perf_tolerance(throughput=0.5)"))
        project.run("--update-baselines=new")
        project.fake(step_seconds=0.25)
        result = project.run("--perf-json", "out.json")
        result.assert_outcomes(passed=1, failed=1)
        assert len(project.launches) == 1 + 1 + 1
        # The one that both tests have is counted once.
        result.stdout.fnmatch_lines(["1 regressed (2 tests of *"])
        golden.lines(result.stdout, ": 1 of")
        cases = json.loads((project.path / "out.json").read_text())["results"]
        assert [case.get("shared_launches", 0) for case in cases] == [0, 1]

    def test_a_plan_counts_them_once(self, project: Project, golden: Golden) -> None:
        project.pytester.makepyfile(test_mine=self.TWO.format(mark=""))
        result = project.run("--perf-dry-run")
        result.stdout.fnmatch_lines(["1 case(s), 1 launch*"])
        golden.lines(result.stdout, "shares the launches")
