"""``--perf-report``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

# As where a package is not installed.
HIDDEN = """
from pytest_llmperf.report import page as installed

found = installed.find_spec
installed.find_spec = lambda name: None if name == {hidden!r} else found(name)
"""


@pytest.fixture
def complete() -> None:
    """Where what a page takes is installed."""
    for name in ("jinja2", "vl_convert"):
        pytest.importorskip(name, reason="a page takes the extra `page`")


@pytest.mark.usefixtures("complete")
class TestWherePagesCanBeMade:
    def test_a_run_is_written_as_a_page_with_the_command_that_runs_each_case_again(
        self, project: Project, golden: Golden
    ) -> None:
        (project.path / "bl").mkdir()
        result = project.run("--perf-report=night.html", "--perf-json=out.json", "--perf-baselines=bl")
        result.assert_outcomes(failed=2)
        text = (project.path / "night.html").read_text(encoding="utf-8")
        assert text.count('<tbody class="case"') == 2
        assert "no baseline yet" in text
        golden.lines(text, "pytest &#39;test_mine.py::test_attention[eager]&#39; --gpus")
        assert '"rerun"' in (project.path / "out.json").read_text(encoding="utf-8")

    def test_the_command_is_right_where_pytest_was_started(self, project: Project) -> None:
        (project.path / "sub").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project.path / "sub")
            (project.path / "sub" / "fake.json").write_text("{}", encoding="utf-8")
            project.run("--perf-report=night.html", "--rootdir=..", "..")
        text = (project.path / "sub" / "night.html").read_text(encoding="utf-8")
        assert "pytest &#39;../test_mine.py::test_attention[eager]" in text

    def test_a_case_is_shown_beside_its_baseline(self, project: Project, golden: Golden) -> None:
        project.record(step_seconds=0.1)
        project.fake(step_seconds=1.0)
        project.run("--perf-report=night.html")
        text = (project.path / "night.html").read_text(encoding="utf-8")
        assert '<h3 class="regressed">2 regressed</h3>' in text
        golden.lines(text, "Median step: 0.1")

    def test_workers_of_xdist_leave_the_page_to_their_controller(self, project: Project) -> None:
        pytest.importorskip("xdist")
        project.run("-n", "2", "--perf-report=night.html")
        text = (project.path / "night.html").read_text(encoding="utf-8")
        assert text.count('<tbody class="case"') == 2
        assert "test_attention[eager]&#39; --gpus 0</code>" in text

    def test_a_run_that_measured_nothing_is_a_page_too(self, project: Project, golden: Golden) -> None:
        project.run("-k", "nothing_is_called_so", "--perf-report=night.html")
        golden.lines((project.path / "night.html").read_text(encoding="utf-8"), "No case was")

    def test_what_goes_wrong_with_a_page_costs_a_line_and_the_run_is_red(
        self, project: Project, golden: Golden
    ) -> None:
        conftest = project.path / "conftest.py"
        broken = "\nfrom pytest_llmperf.run import run_page\nrun_page.page_of = None\n"
        conftest.write_text(conftest.read_text() + broken, encoding="utf-8")
        project.record()
        result = project.run("--perf-report=night.html", "--perf-json=out.json")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(passed=2, errors=1)
        golden.lines(result.stdout, "night.html: no page")
        assert (project.path / "out.json").exists()

    def test_a_history_that_cannot_be_read_is_a_line_beside_the_page(self, project: Project) -> None:
        (project.path / "history.sqlite").write_text("no database", encoding="utf-8")
        project.record()
        result = project.run("--perf-report=night.html", "--perf-history=history.sqlite")
        assert result.ret == 0
        result.stdout.fnmatch_lines(["--perf-report *night.html: *history.sqlite*"])
        assert (project.path / "night.html").exists()

    def test_pytest_itself_never_imports_what_draws(self, project: Project, golden: Golden) -> None:
        conftest = project.path / "conftest.py"
        code = """
import sys
def pytest_sessionfinish(): print("loaded:", [name for name in ("jinja2", "vl_convert") if name in sys.modules])
def pytest_unconfigure(): print("at the end:", "vl_convert" in sys.modules)
"""
        conftest.write_text(conftest.read_text() + code, encoding="utf-8")
        project.record()
        result = project.run()
        result.stdout.fnmatch_lines(["*loaded: []*"])
        result = project.run("--perf-report=night.html")
        golden.lines(result.stdout, "at the end:")

    def test_a_folder_or_a_place_that_cannot_be_written_is_refused_before_anything_runs(
        self, project: Project, golden: Golden
    ) -> None:
        for path, told in (
            (str(project.path), "a folder, expected a file; name one in it"),
            ("nowhere/x.html", "not a file in a folder that exists"),
            ("/proc/x.html", "cannot be written (*); name a file where you may write"),
        ):
            result = project.run("--perf-report", path)
            assert result.ret == pytest.ExitCode.USAGE_ERROR
            result.stderr.fnmatch_lines([f"*--perf-report *: {told}"])
        result = project.run("--perf-json", "/proc/x.json")
        golden.lines(result.stderr, "--perf-json /proc/x.json: cannot")
        assert project.launches == []
        assert not list(Path(project.path).glob(".llmperf-*"))


@pytest.mark.parametrize(("hidden", "name"), [("jinja2", "jinja2"), ("vl_convert", "vl-convert-python")])
def test_what_is_not_installed_is_told_before_anything_runs(
    project: Project, monkeypatch: pytest.MonkeyPatch, hidden: str, name: str
) -> None:
    (project.path / "hiding.py").write_text(HIDDEN.format(hidden=hidden), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(project.path), prepend=os.pathsep)
    result = project.run("-p", "hiding", "--perf-report=night.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    line = f"*--perf-report *night.html: a page takes *{name}*not installed; pip install 'pytest-llmperf[[]page]'"
    result.stderr.fnmatch_lines([line])
    assert project.launches == []
