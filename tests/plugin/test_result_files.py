"""What a run writes for others beside --perf-json: pages of Markdown, and properties in JUnit's XML."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.plugin.conftest import Project


def properties(path: Path) -> list[dict[str, str]]:
    cases = ET.parse(path).getroot().iter("testcase")
    return [{each.attrib["name"]: each.attrib["value"] for each in case.iter("property")} for case in cases]


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_each_case_is_told_in_junit_and_on_the_page(project: Project, workers: tuple[str, ...]) -> None:
    result = project.run("--junit-xml=out.xml", "--perf-markdown=out.md", *workers)
    result.assert_outcomes(failed=2)
    found = properties(project.path / "out.xml")
    assert [each["llmperf.verdict"] for each in found] == ["new", "new"]
    assert all(float(each["llmperf.tokens_per_second_per_gpu"]) > 0 for each in found)
    assert all("llmperf.tokens_per_second_per_gpu.baseline" not in each for each in found)
    failures = list(ET.parse(project.path / "out.xml").getroot().iter("failure"))
    assert all("\n" not in each.attrib["message"] and len((each.text or "").splitlines()) > 1 for each in failures)
    heading, _, remark, _, *table = (project.path / "out.md").read_text().splitlines()
    assert heading == "## llmperf: red: 2 new"
    assert remark.startswith("- CPU: this is no gate of speed")
    assert len(table) == 4


def test_a_step_summary_is_added_to(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project.path / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    project.record()
    assert path.read_text().startswith("before\n\n## llmperf: green: 2 new\n")
    before = path.stat().st_size
    project.run("--perf-dry-run")
    assert path.stat().st_size == before


def test_a_summary_that_is_full_is_a_line_and_no_failure(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.record()
    path = project.path / "summary.md"
    path.write_text("x" * 2**20)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    result = project.run()
    assert result.ret == 0
    assert path.stat().st_size == 2**20
    result.stdout.fnmatch_lines(["GITHUB_STEP_SUMMARY *summary.md: not written, it has 1048576 bytes already*"])


def test_a_page_that_cannot_be_written_is_told_before_anything_runs(project: Project) -> None:
    result = project.run("--perf-markdown", "missing/out.md")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--perf-markdown *missing/out.md: not a file in a folder that exists"])
    assert project.launches == []


def test_what_the_run_itself_fails_for_stands_above_the_table(project: Project) -> None:
    project.record()
    project.pytester.makepyfile(test_mine="def test_one(perf, train_spec):\n    perf.check(train_spec)\n")
    project.run("--perf-strict", "--update-baselines=new")
    result = project.run("--perf-strict", "--perf-markdown=out.md")
    assert result.ret == 1
    text = (project.path / "out.md").read_text()
    assert text.startswith("## llmperf: red: 1 pass\n\n- unused baseline: ")
