"""What a run writes for others beside --perf-json: pages of Markdown, and properties in JUnit's XML."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from pytest_llmperf.report.consumers.exported_run import ExportedRun
from pytest_llmperf.report.consumers.junit import junit
from pytest_llmperf.report.consumers.prometheus import prometheus
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


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_what_fails_beside_its_cases_is_red_everywhere(project: Project, workers: tuple[str, ...]) -> None:
    project.record()
    text = """
        import pytest

        def test_own(perf, train_spec):
            perf.check(train_spec)
            assert False, "afterwards"

        def test_plain():
            raise OSError("plain")

        @pytest.mark.xfail(strict=True, reason="not yet")
        def test_strict():
            pass

        @pytest.fixture
        def leaky():
            yield
            raise ValueError("leaky")

        def test_teardown(leaky):
            pass

        @pytest.mark.skip(reason="no time")
        def test_skipped():
            pass
    """
    project.pytester.makepyfile(test_other=text)
    project.run("test_other.py", "--update-baselines=new", "--perf-json=out.json", "--perf-markdown=out.md", *workers)
    document = json.loads((project.path / "out.json").read_text())
    found = {(test["nodeid"].partition("::")[2], test["outcome"]): test.get("reason", "") for test in document["tests"]}
    assert "afterwards" in found["test_own", "failed"]
    assert "plain" in found["test_plain", "failed"]
    assert found["test_strict", "failed"] == "[XPASS(strict)] not yet"
    assert "leaky" in found["test_teardown", "error"]
    assert "no time" in found["test_skipped", "skipped"]
    run = ExportedRun.read([document])
    assert run.is_red
    assert 'errors="4"' in list(junit(run))[1]
    assert "llmperf_run_green 0" in list(prometheus(run))
    assert "afterwards" in (project.path / "out.md").read_text()


def test_a_night_on_which_nothing_was_collected_raises_the_alert(project: Project) -> None:
    project.run("-k", "nothing", "--perf-json=out.json")
    lines = list(prometheus(ExportedRun.read([json.loads((project.path / "out.json").read_text())])))
    assert "llmperf_run_green 0" in lines
    assert any(line.startswith("llmperf_run_timestamp_seconds ") for line in lines)
