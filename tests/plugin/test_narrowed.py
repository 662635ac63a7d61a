"""A part of the suite: of a file that is gone, only the whole suite knows whether it moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugin.conftest import Project

ONE = "def test_one(perf, train_spec):\n    perf.check(train_spec)\n"

NARROWING: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "paths": [
        (("test_other.py",), "not rootdir; run `pytest .`"),
        (("test_other.py::test_other",), "test_other.py::test_other"),
        (("--ignore", "perf"), "--ignore"),
        (("--ignore-glob", "perf/*"), "--ignore-glob"),
    ],
    "selection": [
        (("--deselect", "perf/test_moved.py"), "2 perf test(s) were left out"),
        (("-k", "other"), "2 perf test(s) were left out"),
        (("-m", "no_such"), "3 perf test(s) were left out"),
        (("-p", "shard"), "2 perf test(s) were left out"),
        (("--lf",), "--last-failed"),
    ],
    "settings": [
        (("-o", "testpaths=test_other.py"), "-o testpaths"),
        (("-o", "python_files=test_o*.py"), "-o python_files"),
        (("-c", "other.ini"), "not rootdir"),
        (("--rootdir", "perf", "--perf-baselines", "baselines", "perf"), "is not under rootdir"),
    ],
}


def unused(project: Project, *options: str) -> list[str]:
    """The lines of a dry run that name a baseline as unused."""
    result = project.run("--perf-dry-run", "--perf-json=plan.json", *options)
    return [line for line in result.outlines if line.startswith("unused baseline:")]


def doubts(project: Project) -> str:
    """Why the last dry run does not know of every baseline whether it is in use, by its file."""
    coverage = json.loads((project.path / "plan.json").read_text())["suite"]["coverage"]
    return "; ".join([*coverage["parts"], *coverage["gaps"]])


@pytest.fixture
def moved(project: Project) -> Path:
    """A project whose test file moved into a folder, beside another file that stayed."""
    project.pytester.makepyfile(test_other="def test_other(perf, train_spec):\n    perf.check(train_spec)\n")
    project.record()
    folder = project.path / "perf"
    folder.mkdir()
    (project.path / "test_mine.py").rename(folder / "test_moved.py")
    return folder


def test_words_of_k_that_no_perf_test_has_are_told_with_those_that_they_are_like(project: Project) -> None:
    run = {
        words: [line for line in project.run("-k", words).outlines if "mean -k" in line]
        for words in ("sdap", "not sdpa", "filterwarnings and sdap", "conftest")
    }
    told = ["llmperf: no perf test has sdap, did you mean -k sdpa?"]
    assert run == {"sdap": told, "not sdpa": [], "filterwarnings and sdap": told, "conftest": []}


@pytest.mark.parametrize("narrowing", NARROWING.values(), ids=NARROWING.keys())
def test_nothing_that_moved_is_unused(
    project: Project, moved: Path, narrowing: list[tuple[tuple[str, ...], str]]
) -> None:
    (project.path / "other.ini").write_text("[pytest]\ntestpaths = test_other.py\n")
    sharding = "def pytest_collection_modifyitems(items):\n    items[:] = [i for i in items if 'other' in i.nodeid]\n"
    project.pytester.makepyfile(shard=sharding)
    project.fake(fail="error")
    assert project.run("test_other.py").ret == pytest.ExitCode.TESTS_FAILED  # --lf will run it alone
    for options, said in narrowing:
        assert unused(project, *options) == [], options
        assert said in doubts(project), options


def test_the_whole_suite_keeps_what_moved(project: Project, moved: Path) -> None:
    for options in ((), (".",), ("-n", "1"), ("--ff",), ("test_other.py", ".")):
        assert unused(project, *options) == []


def test_the_whole_suite_names_what_is_gone(project: Project, moved: Path) -> None:
    (moved / "test_moved.py").unlink()
    assert ["eager" in line for line in unused(project)] == [True]


def test_a_run_of_one_file_lists_only_what_that_file_recorded(project: Project, moved: Path) -> None:
    result = project.run("test_other.py", "--perf-strict")
    assert ("unused" in result.stdout.str(), result.ret) == (False, 0)
    (moved / "test_moved.py").rename(project.path / "test_mine.py")
    project.pytester.makepyfile(test_mine=ONE)
    assert "eager" in project.run("test_mine.py").stdout.str().partition("unused baseline:")[2]


def test_a_file_that_is_not_collected_may_hold_the_test(project: Project, moved: Path) -> None:
    text = (moved / "test_moved.py").read_text()
    for broken in ("import no_such_module\n", "import pytest\npytest.importorskip('no_such_module')\n"):
        (moved / "test_moved.py").write_text(broken + text)
        assert unused(project, "--continue-on-collection-errors") == []
        assert "perf/test_moved.py: collection" in doubts(project)


@pytest.mark.parametrize("stop", ["-x", "--maxfail=1"])
def test_a_run_that_stopped_did_not_hear_everyone(project: Project, moved: Path, stop: str) -> None:
    project.pytester.makepyfile(test_a="def test_a():\n    assert False\n")
    (moved / "test_moved.py").unlink()
    assert unused(project, stop) == []


def test_testpaths_are_the_suite_unless_somebody_else_recorded(project: Project) -> None:
    (project.path / "tests").mkdir()
    (project.path / "test_mine.py").rename(project.path / "tests" / "test_mine.py")
    project.pytester.makeini("[pytest]\ntestpaths = tests\n")
    project.record()
    assert unused(project) == []
    (project.path / "tests" / "test_mine.py").rename(project.path / "tests" / "test_renamed.py")
    (project.path / "tests" / "test_renamed.py").write_text(ONE)
    for options in ((), ("tests",)):
        assert ["eager" in line for line in unused(project, *options)] == [True]
    other = "def test_two(perf, train_spec):\n    perf.check(replace(train_spec, micro_batch_size=2))\n"
    project.pytester.makepyfile(test_outside=f"from dataclasses import replace\n\n{other}")
    assert project.run("--update-baselines=new", "test_outside.py").ret == 0
    (project.path / "test_outside.py").rename(project.path / "test_renamed.py")
    assert unused(project) == []
    assert "test_outside.py, which recorded" in doubts(project)


def test_a_folder_that_recorded_everything_is_the_suite(project: Project) -> None:
    folder = project.path / "perf"
    folder.mkdir()
    (project.path / "test_mine.py").rename(folder / "test_mine.py")
    project.pytester.makeini("[pytest]\ntestpaths = tests\n")
    assert project.run("--update-baselines=new", "perf").ret == 0
    (folder / "test_mine.py").rename(folder / "test_renamed.py")
    assert unused(project, "perf") == []
    (folder / "test_renamed.py").write_text(ONE)
    assert len(unused(project, "perf")) == 1


def test_a_suite_without_perf_tests_names_nothing(project: Project) -> None:
    project.record()
    project.pytester.makepyfile(test_mine="def test_plain(): pass\n")
    assert unused(project) == []
