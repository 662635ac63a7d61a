"""What fails a run and is no test's: it is seen where a failing test would be."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

ONE = "def test_one(perf, train_spec):\n    perf.check(train_spec)\n"

GONE = """
from pathlib import Path

def test_one(perf, train_spec):
    perf.check(train_spec)
    Path("gone").rmdir()
    Path("gone").touch()
"""


@pytest.fixture
def unused(project: Project) -> Project:
    """A project with a baseline that no case has."""
    project.record()
    project.pytester.makepyfile(test_mine=ONE)
    return project


def errors(path: Path) -> list[tuple[str, str, str]]:
    """Class, name and message of each testcase with an error in a JUnit file, which counts them too."""
    suite = ET.parse(path).getroot()[0]
    found = [(case, case.find("error")) for case in suite.iter("testcase")]
    told = [(case.attrib["classname"], case.attrib["name"], e.attrib["message"]) for case, e in found if e is not None]
    assert int(suite.get("errors", "")) == len(told)
    return told


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_an_unused_baseline_is_an_error_of_a_strict_run(
    unused: Project, workers: tuple[str, ...], golden: Golden
) -> None:
    result = unused.run("--perf-strict", "--junit-xml=out.xml", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["ERROR llmperf::unused baselines - *", "=* 1 passed, 1 error in *"])
    golden.lines(result.stdout, "ERROR at teardown", "unused baseline:")
    assert "200%" not in result.stdout.str()
    ((kind, name, message),) = errors(unused.path / "out.xml")
    assert (kind, name) == ("llmperf", "unused baselines")
    assert "eager" in message


@pytest.mark.parametrize("quiet", [("-q",), ("-v",), ("-p", "no:terminal"), ("--tb=no",)])
def test_it_is_told_in_every_kind_of_output(unused: Project, quiet: tuple[str, ...]) -> None:
    result = unused.run("--perf-strict", "--junit-xml=out.xml", *quiet)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert len(errors(unused.path / "out.xml")) == 1
    if "no:terminal" not in quiet:
        result.stdout.fnmatch_lines(["ERROR llmperf::unused baselines*"])


def test_a_green_run_has_none(project: Project) -> None:
    project.record()
    result = project.run("--perf-strict", "--junit-xml=out.xml", "--perf-json=out.json")
    result.assert_outcomes(passed=2)
    assert errors(project.path / "out.xml") == []


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_results_that_cannot_be_written_are_an_error(
    project: Project, workers: tuple[str, ...], golden: Golden
) -> None:
    project.pytester.makepyfile(test_mine=GONE)
    project.pytester.mkdir("gone")
    result = project.run("--update-baselines", "--perf-json=gone/out.json", "--junit-xml=out.xml", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["ERROR llmperf::--perf-json - *"])
    golden.lines(result.stdout, "gone/out.json: not written")
    assert [name for _, name, _ in errors(project.path / "out.xml")] == ["--perf-json"]


def test_it_is_no_test_that_failed_last(unused: Project, golden: Golden) -> None:
    unused.run("--perf-strict").assert_outcomes(passed=1, errors=1)
    result = unused.run("--lf")
    result.assert_outcomes(passed=1)
    golden.lines(result.stdout, "run-last-failure: no previously")


def test_a_text_of_too_few_rows_launches_nothing(project: Project, golden: Golden) -> None:
    project.pytester.makefile(".txt", small="a few words")
    spec = 'TrainSpec(model="llama-tiny", data="text", text="small.txt", sequence_length=64)'
    test = f"from pytest_llmperf import TrainSpec\n\ndef test_one(perf):\n    perf.check({spec})\n"
    project.pytester.makepyfile(test_mine=test)
    result = project.run()
    result.assert_outcomes(failed=1)
    assert not (project.path / "launches.txt").exists()
    golden.lines(result.stdout, "expected enough for one step")
