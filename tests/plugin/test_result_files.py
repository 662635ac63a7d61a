"""What a run writes for others beside --perf-json: pages of Markdown, and properties in JUnit's XML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from pytest_llmperf.cli.night_results import gather
from pytest_llmperf.records.results_document import document_of
from pytest_llmperf.report.exports import ExportedRun
from tests.golden import Golden
from tests.plugin.conftest import Project


def properties(path: Path) -> list[dict[str, str]]:
    cases = ET.parse(path).getroot().iter("testcase")
    return [{each.attrib["name"]: each.attrib["value"] for each in case.iter("property")} for case in cases]


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_each_case_is_told_in_junit_and_on_the_page(project: Project, workers: tuple[str, ...], golden: Golden) -> None:
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
    golden(remark)
    assert len(table) == 4


def test_a_page_that_cannot_be_written_is_told_before_anything_runs(project: Project, golden: Golden) -> None:
    result = project.run("--perf-markdown", "missing/out.md")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "missing/out.md: not a")
    assert project.launches == []


def test_what_the_run_itself_fails_for_stands_above_the_table(project: Project, golden: Golden) -> None:
    project.record()
    project.pytester.makepyfile(test_mine="def test_one(perf, train_spec):\n    perf.check(train_spec)\n")
    project.run("--perf-strict", "--update-baselines=new")
    result = project.run("--perf-strict", "--perf-markdown=out.md")
    assert result.ret == 1
    text = (project.path / "out.md").read_text()
    golden(text)


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_what_fails_beside_its_cases_is_red_everywhere(
    project: Project, workers: tuple[str, ...], golden: Golden
) -> None:
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
    run = ExportedRun.of(document_of(document))
    assert run.is_red
    (own,) = (case for case in run.cases if case.result.nodeid.endswith("test_own"))
    assert own.outcome == "pass, test failed"
    assert "test failed: " in own.explanation
    assert "afterwards" in own.explanation
    page = (project.path / "out.md").read_text()
    assert "pass, test failed" in page
    assert "afterwards" in page
    night = gather([project.path / "out.json"], [])
    golden(night.headline)
    assert any("test_plain: failed: " in line for line in night.troubles)
    assert [test["outcome"] for test in night.document()["tests"]] == [test["outcome"] for test in document["tests"]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def test_b(): pytest.exit('enough', returncode=0)", "the run was ended before its end: pytest.exit: enough"),
        ("import nothing_there", "test_other.py: error at collect: ModuleNotFoundError: No module named"),
        ("def test_b(nope): pass", "test_other.py::test_b: error at setup: fixture 'nope' not found"),
        (
            "def test_b(subtests):\n    with subtests.test('x'): assert False, 'sub'",
            "test_other.py::test_b: failed: AssertionError: sub",
        ),
        (
            "class T(unittest.TestCase):\n    def test_b(self):\n        with self.subTest(x=1): assert False, 'sub'",
            "test_other.py::T::test_b: failed: AssertionError: sub",
        ),
    ],
)
def test_a_run_that_ended_or_lost_something_is_red_and_says_what(project: Project, text: str, told: str) -> None:
    project.pytester.makepyfile(test_other="import pytest, unittest\n" + text)
    project.run("test_other.py", "test_mine.py", "--update-baselines=new", "--perf-json=out.json")
    run = ExportedRun.of(document_of(json.loads((project.path / "out.json").read_text())))
    assert run.is_red
    assert any(line.startswith(told) for line in run.troubles), run.troubles


def test_what_fails_in_a_subtest_after_its_case_was_judged_makes_no_case(project: Project) -> None:
    text = """
        def test_b(perf, train_spec, subtests):
            with subtests.test("one"):
                perf.check(train_spec)
            with subtests.test("two"):
                assert False, "sub"
    """
    project.pytester.makepyfile(test_other=text)
    project.run("test_other.py", "--update-baselines=new", "--perf-json=out.json")
    run = ExportedRun.of(document_of(json.loads((project.path / "out.json").read_text())))
    assert [(case.outcome, "sub" in case.explanation) for case in run.cases] == [("new, test failed", True)]


def test_what_is_expected_to_regress_is_green_for_all_who_read_it(project: Project, golden: Golden) -> None:
    text = """
        import pytest

        @pytest.mark.xfail(reason="known since May")
        def test_own(perf, train_spec):
            perf.check(train_spec)
    """
    project.pytester.makepyfile(test_other=text)
    project.run("test_other.py", "--update-baselines=new")
    project.fake(step_seconds=9.0)
    result = project.run("test_other.py", "--perf-json=out.json", "--perf-markdown=out.md")
    assert result.ret == 0
    document = json.loads((project.path / "out.json").read_text())
    run = ExportedRun.of(document_of(document))
    assert run.headline == "green: 1 regressed (1 expected)"
    golden(run.cases[0].explanation)
    night = gather([project.path / "out.json"], [])
    assert night.headline == "green: 1 regressed (1 expected)"
    assert "regressed, expected" in (project.path / "out.md").read_text()


@pytest.mark.parametrize(
    ("night", "fake"),
    [
        ("nothing is collected", {}),
        ("every case is invalid", {"evidence": {"attention": "eager"}}),
        ("every case is slower", {"step_seconds": 9.0}),
        ("no launch yields a record", {"fail": "error"}),
        ("a test fails by itself", {}),
    ],
)
def test_each_kind_of_red_night_is_red_by_its_run_and_merged(
    project: Project, night: str, fake: dict[str, Any]
) -> None:
    project.record()
    project.fake(**fake)
    words = ["-k", "nothing"] if night == "nothing is collected" else []
    if night == "a test fails by itself":
        project.pytester.makepyfile(test_other="def test_plain():\n    raise OSError\n")
    project.run("--perf-json=out.json", *words)
    for document in (
        json.loads((project.path / "out.json").read_text()),
        gather([project.path / "out.json"], []).document(),
    ):
        assert ExportedRun.of(document_of(document)).is_red


def test_a_green_night_is_green(project: Project) -> None:
    project.record()
    project.run("--perf-json=out.json")
    for document in (
        json.loads((project.path / "out.json").read_text()),
        gather([project.path / "out.json"], []).document(),
    ):
        assert not ExportedRun.of(document_of(document)).is_red
