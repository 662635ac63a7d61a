"""Unused baselines: what a run may say of them, and that none is named which is in use."""

from __future__ import annotations

import pytest

from tests.golden import Golden
from tests.plugin.conftest import FOUR_LINES, Project

SEVERAL = """
from dataclasses import replace

def test_several(perf, train_spec):
    for size in (1, 2, 3):
        perf.check(replace(train_spec, micro_batch_size=size))
"""

# The same specs, and a use of the first result between them.
USING = """
from dataclasses import replace

def test_using(perf, train_spec):
    first = perf.check(replace(train_spec, micro_batch_size=1))
    assert first.check("final_loss").value > 0
    perf.check(replace(train_spec, micro_batch_size=2))
"""

ONE = "def test_one(perf, train_spec):\n    perf.check(train_spec)\n"


def write(project: Project, **files: str) -> None:
    project.pytester.makepyfile(**files)


def unused(result: pytest.RunResult) -> list[str]:
    """The micro-batches of the baselines that are named as unused."""
    lines = [line for line in result.outlines if line.startswith("unused baseline: ")]
    return [line.partition(".json")[0].split("-")[-2] for line in lines]


class TestSeveralSpecs:
    @pytest.mark.parametrize("workers", [(), ("-n", "1")])
    def test_a_dry_run_hears_all_of_them(self, project: Project, workers: tuple[str, ...]) -> None:
        write(project, test_mine=SEVERAL)
        project.record()
        write(project, test_mine=SEVERAL.replace("(1, 2, 3)", "(1, 3)"))
        result = project.run("--perf-dry-run", *workers)
        result.assert_outcomes(skipped=1)
        assert (result.ret, unused(result), project.launches) == (0, ["mbs2"], [])

    def test_a_dry_run_plans_all_of_them(self, project: Project) -> None:
        write(project, test_mine=SEVERAL)
        result = project.run("--perf-dry-run")
        result.assert_outcomes(skipped=1)
        result.stdout.fnmatch_lines(["*1. *mbs1*", "*2. *mbs2*", "*3. *mbs3*", "3 case(s), 3 launch(es)*"])
        assert "unused" not in result.stdout.str()

    def test_one_that_cannot_run_here_does_not_hide_the_next(self, project: Project) -> None:
        write(project, test_mine=SEVERAL)
        project.record()
        wide = "perf.check(replace(train_spec, gpus=64))\n    for size"
        write(project, test_mine=SEVERAL.replace("for size", wide))
        assert "unused" not in project.run("--perf-strict").stdout.str()
        result = project.run("--perf-dry-run")
        assert (result.ret, unused(result)) == (0, [])
        result.stdout.fnmatch_lines(["*skipped: *needs 64 ranks*", "3 case(s), 3 launch(es)*"])

    def test_both_sides_of_a_comparison_are_in_use(self, project: Project) -> None:
        body = """
            from dataclasses import replace

            def test_mine(perf, train_spec):
                perf.check(train_spec)
                {check}(replace(train_spec, micro_batch_size=2))
            """
        write(project, test_mine=body.format(check="perf.check"))
        project.record()
        write(project, test_mine=body.format(check="(lambda other: perf.compare(train_spec, other))"))
        assert unused(project.run("--perf-dry-run")) == []

    def test_a_fixture_may_ask_too(self, project: Project) -> None:
        write(
            project,
            test_mine="""
            from dataclasses import replace
            import pytest

            @pytest.fixture
            def first(perf, train_spec):
                return perf.check(train_spec)

            def test_it(first, perf, train_spec):
                perf.check(replace(train_spec, micro_batch_size=2))
            """,
        )
        project.record()
        result = project.run("--perf-dry-run")
        result.assert_outcomes(skipped=1)
        assert unused(result) == []


class TestIncomplete:
    """A test that ended before its end may run more than it said."""

    @pytest.mark.parametrize(
        "body",
        [
            USING,
            USING.replace("assert first", "perf.measure(train_spec)\n    assert first"),
            USING.replace("    first =", "    import pytest\n    pytest.skip('not today')\n    first ="),
            USING.replace("assert first", "raise OSError\n    assert first"),
        ],
        ids=["used", "measured", "skipped", "failed"],
    )
    def test_nothing_of_its_file_is_named(self, project: Project, body: str) -> None:
        write(project, test_mine=USING, test_other=FOUR_LINES)
        project.record()
        write(project, test_mine=body, test_other=ONE)
        result = project.run("--perf-dry-run")
        result.assert_outcomes(skipped=2)
        lines = [line for line in result.outlines if line.startswith("unused baseline:")]
        assert ["eager" in line and "delete the file" in line for line in lines] == [True]

    def test_a_dry_run_says_how_it_ended(self, project: Project, golden: Golden) -> None:
        write(project, test_mine=USING)
        result = project.run("--perf-dry-run", "-rs")
        result.assert_outcomes(skipped=1)
        golden.lines(result.stdout, "dry run: nothing")
        assert result.ret == 0

    def test_an_expected_failure_is_skipped_like_any_other(self, project: Project) -> None:
        marked = "\n".join(
            f"@pytest.mark.xfail(strict={strict})\n{ONE.replace('one', name)}"
            for name, strict in (("one", False), ("two", True))
        )
        write(project, test_mine=f"import pytest\n\n{marked}")
        project.run("--perf-dry-run").assert_outcomes(skipped=2)

    def test_a_regression_at_the_first_spec_leaves_the_later_ones_alone(self, project: Project) -> None:
        write(project, test_mine=SEVERAL)
        project.record(step_seconds=0.1)
        project.fake(step_seconds=3.0)
        result = project.run("--perf-strict")
        result.assert_outcomes(failed=1)
        assert "unused" not in result.stdout.str()

    def test_a_broken_baseline_fails_a_dry_run(self, project: Project) -> None:
        write(project, test_mine=SEVERAL)
        project.record()
        project.baselines[1].write_text("{}")
        project.run("--perf-dry-run").assert_outcomes(failed=1)

    def test_one_that_is_skipped_here_leaves_others_to_be_listed(self, project: Project) -> None:
        body = """
            import pytest

            @pytest.mark.parametrize("gpus", {gpus})
            def test_wide(perf, train_spec):
                perf.check(train_spec)
            """
        write(project, test_mine=body.format(gpus=[1, 2, 3]))
        project.record()
        write(project, test_mine=body.format(gpus=[1, 3, 64]))
        lines = [line for line in project.run().outlines if line.startswith("unused")]
        assert ["gpus2" in line for line in lines] == [True]


class TestOtherTests:
    @pytest.mark.parametrize("options", [("--benchmark-only",), ("-W", "error")])
    def test_neighbours_see_a_skipped_test(self, project: Project, options: tuple[str, ...]) -> None:
        result = project.run("--perf-dry-run", "--junitxml=out.xml", *options)
        result.assert_outcomes(skipped=2)
        assert 'skipped="2"' in (project.path / "out.xml").read_text()

    def test_subtests_say_all_of_theirs(self, project: Project) -> None:
        pytest.importorskip("_pytest.subtests", reason="subtests came with pytest 9")
        write(
            project,
            test_mine="""
            from dataclasses import replace

            def test_several(perf, train_spec, subtests):
                for size in (1, 2):
                    with subtests.test(size=size):
                        perf.check(replace(train_spec, micro_batch_size=size))
            """,
        )
        project.record()
        assert unused(project.run("--perf-dry-run")) == []


class TestStaticFigures:
    """Files of ``baselines/static``, which are of no machine kind."""

    @pytest.fixture
    def recorded(self, project: Project) -> Project:
        """Static figures alone of three cases for the CPU, of which the tests have two by now."""
        write(project, test_mine=SEVERAL)
        assert project.run("--perf-static", "--update-baselines=new").ret == 0
        write(project, test_mine=SEVERAL.replace("(1, 2, 3)", "(1, 3)"))
        return project

    def test_a_run_that_judges_by_them_lists_the_others(self, recorded: Project, golden: Golden) -> None:
        result = recorded.run("--perf-static")
        golden.lines(result.stdout, "delete the file)")
        assert result.ret == 0
        assert recorded.run("--perf-static", "--perf-strict").ret == 1

    def test_what_a_run_for_gpus_recorded_is_unused_by_no_run_on_the_cpu(self, project: Project) -> None:
        write(project, test_mine=SEVERAL)
        static = ("-p", "no:randomly", "--perf-static")
        assert project.pytester.runpytest_subprocess(*static, "--update-baselines=new").ret == 0
        write(project, test_mine=SEVERAL.replace("(1, 2, 3)", "(1, 3)"))
        assert unused(project.run("--perf-dry-run")) == []
        result = project.pytester.runpytest_subprocess(*static)
        result.stdout.fnmatch_lines(["unused baseline: *static/*mbs2-gpus1.json (*"])

    def test_one_that_cannot_be_read_is_named_instead(self, recorded: Project, golden: Golden) -> None:
        recorded.baselines[0].write_text("{}")
        golden.lines(recorded.run("--perf-dry-run").stdout, "mbs1-gpus1.json: not a")
