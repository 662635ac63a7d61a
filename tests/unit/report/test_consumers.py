"""Results as others read them: a page of Markdown; and the ready files for CI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.result import VERDICTS
from pytest_llmperf.records.results_document import document_of
from pytest_llmperf.report.exports import ExportedRun, markdown_page
from tests.examples import examples
from tests.golden import Golden
from tools.documentation.commands import troubles

HOSTILE = ['a"b\\c', "two\nlines", "pipe | <b>bold</b> # {x}", "ü \u2028 日本", "x" * 5000, "\ud800\x00]]>", "", "'"]
RATE = {"value": 100.0, "unit": "tokens/s", "baseline": 110.0, "limit": 108.0, "change": -0.0909, "detectable": 0.01}


def result(name: str = "case", verdict: str = "pass", **others: Any) -> dict[str, Any]:
    metrics = {"tokens_per_second_per_gpu": RATE, "peak_reserved_bytes": {"value": 2.0**30, "unit": "bytes"}}
    values = {"id": name, "digest": "d", "nodeid": f"t.py::test[{name}]", "verdict": verdict, "reason": "why"}
    return {**values, "metrics": metrics, "launches": [], **others}


def document(*results: dict[str, Any], kind: str = "gpu", **others: Any) -> dict[str, Any]:
    return {"schema": 1, "machine": {"kind": kind}, "results": list(results), "exit_code": 0, **others}


def run(document: dict[str, Any]) -> ExportedRun:
    return ExportedRun.of(document_of(document))


NAMES = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20))
FIGURES = st.one_of(st.none(), st.floats(), st.integers(), st.just(10**400))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    found = []
    for number in range(draw(st.integers(0, 3))):
        metrics = {
            name: {"value": draw(FIGURES), "unit": draw(NAMES), "baseline": draw(FIGURES), "change": draw(FIGURES)}
            for name in draw(st.lists(st.sampled_from([*METRICS, "new|metric", "9 x"]), max_size=3, unique=True))
        }
        words = {"reason": draw(NAMES), "changed": [draw(NAMES)], "digest": str(number)}
        found.append(result(draw(NAMES), draw(st.sampled_from(VERDICTS)), metrics=metrics, **words))
    unfinished = {"unfinished": "SIGTERM"} if draw(st.booleans()) else {}
    return document(*found, kind=draw(NAMES), skipped=[{"id": draw(NAMES), "reason": "no GPU"}], **unfinished)


@examples(50)
@given(documents())
def test_whatever_names_and_figures_there_are_the_page_is_a_table(found: dict[str, Any]) -> None:
    told = run(found)
    page = markdown_page(told)
    assert all("\n" not in line for line in page)
    rows = [line for line in page if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) <= 1
    assert len(rows) == (len(told.cases) + 2 if told.cases else 0)


def test_a_run_that_was_aborted_says_so_everywhere_that_it_can(golden: Golden) -> None:
    aborted = run(document(result(), unfinished="SIGTERM", exit_code=2))
    assert markdown_page(aborted)[0] == "## llmperf: red: 1 pass"
    golden.lines(markdown_page(aborted), "ended before its")


def test_of_a_case_the_worst_verdict_counts() -> None:
    assert [case.verdict for case in run(document(result(), result(verdict="regressed"))).cases] == ["regressed"]


def test_of_two_tests_of_one_training_that_ended_alike_the_first_is_told() -> None:
    told = run(document(result(nodeid="t.py::test_first"), result(nodeid="t.py::test_again")))
    assert [case.result.nodeid for case in told.cases] == ["t.py::test_first"]


def test_words_and_figures_are_told_as_the_document_has_them() -> None:
    metrics = {"flops_per_step": {"value": 2e19, "unit": "FLOP"}, "updated": {"value": 1e-20, "unit": "a\nb"}}
    case = run(document(result(nodeid="t.py::test[a  b]", reason="c  d", metrics=metrics))).cases[0]
    assert (case.result.nodeid, case.result.reason) == ("t.py::test[a  b]", "c  d")
    figures = [(name, figure.unit, figure.value) for name, figure in case.result.metrics.items()]
    assert figures == [("flops_per_step", "FLOP", 2e19), ("updated", "a b", 1e-20)]


def test_what_is_skipped_for_one_reason_is_a_line_of_the_page(golden: Golden) -> None:
    skipped = [{"id": name, "reason": f"{name}: needs a GPU"} for name in "abcd"] + [{"id": "e", "reason": "e: a rest"}]
    page = markdown_page(run(document(result(), skipped=skipped)))
    golden([line for line in page if line.startswith("- ")])


@pytest.mark.parametrize("is_told", [True, False])
def test_where_speed_is_no_gate_the_page_says_so(is_told: bool) -> None:
    found = result()
    # Without it the limit is as wide by noise, and the gate says what it sees.
    wide = {"times_slower": 4.0} if is_told else {}
    found["metrics"] = {"tokens_per_second_per_gpu": RATE | {"limit": 27.5} | wide}
    told = [line for line in markdown_page(run(document(found))) if "speed is not gated" in line]
    assert len(told) == is_told
    assert all("4 times slower" in line for line in told)


def test_the_files_of_docs_ci_are_what_the_page_shows(pytestconfig: pytest.Config) -> None:
    yaml = pytest.importorskip("yaml")
    docs = Path(__file__).parents[3] / "docs"
    github = yaml.safe_load((docs / "ci" / "github-actions.yml").read_text())
    gitlab = yaml.safe_load((docs / "ci" / "gitlab-ci.yml").read_text())
    assert set(github["jobs"]) == {"perf-static", "perf-comment", "perf-gpu", "perf-record"}
    assert {"perf-static", "perf-gpu", "perf-record"} <= set(gitlab)
    for jobs in (github["jobs"], gitlab):
        assert "--perf-static" in json.dumps(jobs["perf-static"])
        assert "--perf-strict" in json.dumps(jobs["perf-gpu"])
        assert all("--perf-report" in json.dumps(jobs[name]) for name in ("perf-static", "perf-gpu"))
        assert "--update-baselines" in json.dumps(jobs["perf-record"])
    steps = [step for job in github["jobs"].values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert [step["with"]["persist-credentials"] for step in checkouts] == [False, False, True]
    used = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action) for action in used)
    given = [line for step in steps for line in step.get("run", "").splitlines()]
    given += [line for job in gitlab.values() for name in ("script", "after_script") for line in job.get(name, ())]
    assert sum("pytest" in line for line in given) >= 4
    assert not [told for line in given for told in troubles(line, pytestconfig._parser)]
    assert gitlab["perf-gpu"]["artifacts"]["reports"] == {"junit": "perf-gpu.xml"}
