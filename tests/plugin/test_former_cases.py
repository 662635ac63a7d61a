"""A test whose settings changed begins anew: its former case is named, and replaced with a reason alone."""

from __future__ import annotations

import pytest

from tests.golden import Golden
from tests.plugin.conftest import FOUR_LINES, Project

ONE = """
from dataclasses import replace

def test_one(perf, train_spec):
    perf.check(replace(train_spec, micro_batch_size=1))
"""
OTHER = ONE.replace("size=1", "size=2")
BOTH = ONE + "    perf.check(replace(train_spec, micro_batch_size=2))\n"
CLASS = """
import pytest
from dataclasses import replace

class TestIt:
    @pytest.mark.parametrize("size", [1, 3])
    def test_it(self, perf, train_spec, size):
        perf.check(replace(train_spec, micro_batch_size=size))
"""
UPDATE = "--update-baselines"


def write(project: Project, text: str) -> None:
    project.pytester.makepyfile(test_mine=text)


class TestAnotherSpec:
    def test_a_new_case_names_the_one_that_its_test_had(self, project: Project, golden: Golden) -> None:
        write(project, ONE)
        project.record(step_seconds=0.1)
        write(project, OTHER)
        project.fake(step_seconds=0.4)
        result = project.run()
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, "new: no baseline")

    @pytest.mark.parametrize("how", [(), ("test_mine.py::test_one",), ("-k", "one"), ("-n", "1")])
    def test_it_replaces_that_one_with_a_reason_alone(
        self, project: Project, how: tuple[str, ...], golden: Golden
    ) -> None:
        write(project, ONE)
        project.record()
        write(project, OTHER)
        result = project.run(UPDATE, *how)
        assert result.ret == 1
        golden.lines(result.stdout, "is not recorded:")
        assert [path.stem.split("-")[-2] for path in project.baselines] == ["mbs1"]
        if not how:
            assert project.run(UPDATE, "--perf-reason", "larger").ret == 0
            assert len(project.baselines) == 2
            write(project, BOTH.replace("size=1", "size=4"))  # beside the one that was explained
            assert project.run(UPDATE).ret == 0

    def test_one_more_case_of_a_test_needs_none(self, project: Project) -> None:
        write(project, OTHER)
        project.record()
        write(project, BOTH)  # the new one comes first
        assert project.run(UPDATE, "--perf-reason", "").ret == 0
        assert len(project.baselines) == 2


class TestParameters:
    @pytest.mark.parametrize("how", [(), ("-k", "2"), ("test_mine.py::TestIt::test_it[2]",)])
    def test_another_parameter_in_the_place_of_one(
        self, project: Project, how: tuple[str, ...], golden: Golden
    ) -> None:
        write(project, CLASS)
        project.record()
        write(project, CLASS.replace("[1, 3]", "[2, 3]"))
        result = project.run(UPDATE + "=new", *how)
        assert result.ret == 1
        golden.lines(result.stdout, "is not recorded:")
        assert len(project.baselines) == 2

    @pytest.mark.parametrize("how", [(), ("-k", "2"), ("test_mine.py::TestIt::test_it[2]",)])
    def test_one_more_needs_no_reason(self, project: Project, how: tuple[str, ...]) -> None:
        write(project, CLASS)
        project.record()
        write(project, CLASS.replace("[1, 3]", "[2, 1, 3]"))
        assert project.run(UPDATE + "=new", *how).ret == 0
        assert len(project.baselines) == 3

    def test_other_names_of_the_same_cases_replace_nothing(self, project: Project) -> None:
        write(project, CLASS)
        project.record()
        renamed = CLASS.replace("[1, 3]", "[2, 1, 3], ids=['b', 'a', 'c']")
        write(project, renamed)
        assert project.run(UPDATE + "=new", "-k", "b").ret == 0  # nobody knows what the others are
        assert len(project.baselines) == 3

    def test_a_test_that_another_name_has_is_not_new(self, project: Project) -> None:
        project.record()
        write(project, FOUR_LINES.replace("test_attention", "test_renamed"))
        assert project.run(UPDATE).ret == 0


class TestIdle:
    TESTS = """
import pytest

def test_idle(perf): pass
def test_busy(perf, train_spec): perf.check(train_spec)
def test_skipped(perf): pytest.skip("no")
@pytest.mark.xfail(raises=ValueError)
def test_expected(perf): raise ValueError
"""

    def test_a_test_that_calls_nothing_is_named_and_fails_a_strict_run(self, project: Project, golden: Golden) -> None:
        write(project, self.TESTS)
        project.record()
        for options, code in (((), 0), (("--perf-strict",), 1), (("-n", "1", "--perf-strict"), 1)):
            result = project.run(*options)
            assert result.ret == code
            golden.lines(result.stdout, "takes perf and")
