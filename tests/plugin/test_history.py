"""Every run adds what its cases took to a store, and fails for no store."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest

from pytest_llmperf.records.result import PastResult
from pytest_llmperf.run.history_store import HistoryStore
from tests.golden import Golden
from tests.plugin.conftest import Project


def kept(project: Project) -> list[PastResult]:
    return HistoryStore(project.state / "pytest-llmperf" / "history.sqlite").read()


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_each_run_adds_each_of_its_cases_once(project: Project, workers: tuple[str, ...]) -> None:
    project.fake(step_seconds=0.25)
    project.run(*workers)
    found = kept(project)
    assert len(found) == len({one.id for one in found}) == 2
    assert {one.verdict for one in found} == {"new"}
    assert [one.step_seconds for one in found] == pytest.approx([0.25, 0.25])
    assert found[0].versions["torch"] == "2.0"
    assert found[0].launches[0].host == "host"
    project.run(*workers)
    runs = [one.run for one in kept(project)]
    assert len(runs) == 4
    assert len(set(runs)) == 2


def test_a_run_that_launches_nothing_adds_nothing(project: Project) -> None:
    project.run("--perf-dry-run")
    project.run("--perf-static")
    project.pytester.makepyfile(test_mine="def test_plain(): pass\n")
    project.run()
    assert not (project.state / "pytest-llmperf").exists()


def test_off_keeps_none(project: Project) -> None:
    project.run("--perf-history=off")
    project.pytester.makeini("[pytest]\nperf_history = off\n")
    project.run()
    assert kept(project) == []


def test_the_ini_file_names_another_store_and_the_command_line_another_one(project: Project) -> None:
    project.pytester.makeini("[pytest]\nperf_history = mine.sqlite\n")
    project.run()
    project.run("--perf-history=other.sqlite")
    assert len(HistoryStore(project.path / "mine.sqlite").read()) == 2
    assert len(HistoryStore(project.path / "other.sqlite").read()) == 2
    assert kept(project) == []


@pytest.mark.parametrize("value", ["", ".", "missing/history.sqlite"])
def test_a_place_that_cannot_be_is_told_before_anything_runs(project: Project, value: str) -> None:
    result = project.run(f"--perf-history={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--perf-history *off*"])
    assert project.launches == []


def test_a_store_that_cannot_serve_is_one_line_and_fails_no_run(project: Project, golden: Golden) -> None:
    project.record()
    path = project.path / "broken.sqlite"
    path.write_text("no database\n" * 100)
    result = project.run(f"--perf-history={path}")
    assert result.ret == 0
    told = [line for line in result.outlines if "--perf-history" in line]
    assert len(told) == 1
    golden(told[0])
    assert path.read_text() == "no database\n" * 100


def test_a_store_of_a_newer_version_is_one_line_and_fails_no_run(project: Project, golden: Golden) -> None:
    project.record()
    path = project.path / "newer.sqlite"
    project.run(f"--perf-history={path}")
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    result = project.run(f"--perf-history={path}")
    assert result.ret == 0
    golden.lines(result.stdout, "newer.sqlite: schema 99")


def test_the_revision_of_the_project_is_kept_and_told(project: Project) -> None:
    def git(*words: str) -> str:
        return project.pytester.run("git", "-c", "user.name=a", "-c", "user.email=a@b", *words).stdout.str().strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "--short=12", "HEAD").splitlines()[0]
    project.run("--perf-json=out.json")
    document = json.loads((project.path / "out.json").read_text())
    assert document["revision"]["commit"] == commit
    (project.path / "test_mine.py").write_text((project.path / "test_mine.py").read_text() + "\n")
    project.run()
    assert [one.revision for one in kept(project)][-1] == f"{commit}+"


def test_a_case_that_never_launched_is_not_there(project: Project) -> None:
    project.fake(fail="crash")
    project.run()
    assert kept(project) == []


def test_pytest_loads_no_database_where_nothing_is_kept(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPERF_TEST_FRESH", "1")  # what is forked has it loaded
    project.pytester.makeconftest(
        "import sys\n\nfrom tests.fakes import install\n\ninstall()\n\n\n"
        "def pytest_unconfigure(config):\n"
        "    print('database:', 'sqlite3' in sys.modules)\n"
    )
    for options, is_loaded in ((["--perf-history=off"], False), ([], True)):
        result = project.run("-p", "no:cacheprovider", "-s", *options)
        assert f"database: {is_loaded}" in result.outlines
