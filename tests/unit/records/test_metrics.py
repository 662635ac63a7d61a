"""A metric is one row: what follows from it everywhere, and which files name metrics besides."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import pytest_llmperf
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy, passing_ranges
from pytest_llmperf.judge.store import parse, text_of
from pytest_llmperf.judge.verdict import Judgement, judge
from pytest_llmperf.records import failure
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, Column, EarlyStop, Metric, Rule, formatted, label
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.records.results_document import document_of
from pytest_llmperf.report import summary_table
from pytest_llmperf.report.exports import ExportedRun, case_table
from pytest_llmperf.report.results_json import RunDocument, document
from pytest_llmperf.report.summary_table import summary_lines
from pytest_llmperf.run.run_page import headings
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of
from tests.shelf import accept

_PACKAGE = Path(pytest_llmperf.__file__).parent
SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4)

SPIKES = Metric(
    "spikes_per_step",
    "spikes a step",
    of=lambda runs: min(float(launch.evidence["spikes"]) for launch in runs),
    rule="confirmed",
    gpu=0.5,
    column=Column("spikes"),
)


def launch(spikes: float) -> Launch:
    made = launch_of(SPEC, Fake())
    return replace(made, evidence={**made.evidence, "spikes": spikes})


def accepted(judgement: Judgement, *launches: Launch) -> Baseline:
    return accept(
        None,
        judged=None,
        spec=SPEC,
        machine="m",
        launches=launches,
        verdict="new",
        checks=judgement.checks,
        reason="",
        recorded_at="2026-01-01T00:00:00Z",
        recorded_by="t.py::t",
    )


def test_a_row_says_a_rule_and_an_early_end_that_there_are() -> None:
    assert {row.rule for row in METRICS.values()} == {*get_args(Rule)}
    assert {row.early_stop for row in METRICS.values()} == {*get_args(EarlyStop)}


def test_files_name_the_phases_that_there_are_and_all_of_them() -> None:
    known = {getattr(failure, name) for name in _PHASES.split()}
    assert {*failure._BEGUN.values()} <= known
    assert {*summary_table._OF_A_RUN} == known
    assert {row.phase for row in METRICS.values()} == {"", *failure.HELD}


_PHASES = """
    WAITING START IMPORTS CALIBRATION MODEL FIRST_STEP STEPS TRACE INSPECTION END FAILED SEARCHING COMPARING OTHER
"""


@pytest.fixture
def _one_row_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, SPIKES.name, SPIKES)


@pytest.mark.usefixtures("_one_row_more")
class TestOneRowMore:
    """Of a metric that gates, and has a column."""

    @pytest.fixture
    def result(self) -> CaseResult:
        policy = Policy.for_gpu()
        baseline = accepted(judge([launch(4.0)] * 2, None, policy), launch(4.0), launch(4.0))
        judgement = judge([launch(9.0)] * 2, baseline, policy)
        return CaseResult(
            id=SPEC.id,
            digest=SPEC.digest,
            nodeid="t.py::t",
            machine="m",
            verdict=judgement.verdict,
            reason=judgement.reason,
            checks=judgement.checks,
            launches=(launch(9.0),),
        )

    def test_it_is_judged_by_its_rule_and_its_tolerance(self, result: CaseResult) -> None:
        assert result.verdict == "regressed"
        assert result.reason == "spikes_per_step 9, baseline 4, limit 6 (+125.0 %)"
        check = result.check(SPIKES.name)
        assert check is not None
        assert (check.tolerance, check.verdict) == (0.5, "regressed")
        assert Policy.for_cpu().merged({SPIKES.name: 2.0}).tolerances[SPIKES.name] == 2.0

    def test_it_is_recorded_and_read_again(self) -> None:
        baseline = accepted(judge([launch(4.0)], None, Policy.for_gpu()), launch(4.0))
        again = parse(Baseline, text_of(baseline), "a file")
        assert again.anchor.metrics[SPIKES.name] == 4.0
        assert judge([launch(4.0)], again, Policy.for_gpu()).verdict == "pass"

    def test_nothing_ends_early_that_it_does_not_allow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        baseline = accepted(judge([launch(4.0)], None, Policy.for_gpu()), launch(4.0))
        assert passing_ranges(baseline, Policy.for_gpu(), "2026-01-09") is None
        monkeypatch.setitem(METRICS, SPIKES.name, replace(SPIKES, early_stop="settled"))
        assert passing_ranges(baseline, Policy.for_gpu(), "2026-01-09") is not None

    def test_it_is_shown_in_each_table_with_its_change_and_in_messages(self, result: CaseResult) -> None:
        (head, row) = summary_lines([result], width=None, color=False)[:2]
        assert "spikes" in head
        assert "+125.0 %" in row
        values = json.loads(json.dumps(document({"kind": "m"}, [result])))
        (markdown, _, first) = case_table(ExportedRun.of(document_of(values)).cases)[:3]
        assert "spikes" in markdown
        assert "+125.0 %" in first
        assert {"spikes", "spikes change"} <= {*headings([RunDocument(values)])}
        assert label(SPIKES.name) == "spikes a step"
        assert formatted(SPIKES.name, 9.0, "1") == "9"


#: Why each of these names three metrics or more, beside the table of all.
EXCEPTIONS = {
    "cli/commands/plan.py": "fields of its own document, of a step that was counted and not launched",
    "cli/commands/tune.py": "fields of its own document, of trials and not of cases",
    "cli/commands/expect.py": "fields of its own document, of a case that need not have been launched",
    "judge/soak.py": "fields of a diary's lines, and what a soak has of a launch's figures",
    "observe/measurement.py": "fields of a diary's lines",
    "judge/store.py": "figures of a file that follow from one another",
    "judge/static_steps.py": "how each is counted of a step without a launch",
    "records/result.py": "what stands in the place of a rate: a result is asked for either",
    "records/ranks.py": "which rank's evidence counts, of what is counted",
    "records/trace.py": "which rows of a trace each count is of",
}


def _named(source: str) -> Iterator[str]:
    """The metrics that ``source`` names by themselves, in no ``METRICS[name]``."""
    tree = ast.parse(source)
    rows = {
        id(node.slice)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "METRICS"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in METRICS and id(node) not in rows:
            yield str(node.value)


def test_no_other_file_lists_metrics() -> None:
    found = {
        path.relative_to(_PACKAGE).as_posix(): {*_named(path.read_text(encoding="utf-8"))}
        for path in _PACKAGE.rglob("*.py")
    }
    listing = {name for name, named in found.items() if len(named) > 2}
    assert listing - {*EXCEPTIONS} == {"records/metrics.py"}, "a fact of a metric belongs into its row"
    assert {*EXCEPTIONS} <= listing, "an exception that is needed no more"


@pytest.mark.parametrize("row", METRICS.values(), ids=METRICS)
def test_each_row_is_whole(row: Metric) -> None:
    assert METRICS[row.name] is row
    is_read = row.rule in ("speed", "confirmed", "exact", "phase")
    assert (row.of is not None) == is_read
    assert is_read or (row.gpu, row.cpu, row.early_stop, row.is_raw) == (None, None, "", False)
    assert (row.rule == "phase") == bool(row.phase)
    assert row.rule == "count" or not (row.costly or row.evidence)
