"""What colours a point of a chart: its own metric, whatever else its case lost."""

from __future__ import annotations

from dataclasses import replace

from pytest_llmperf.analysis import ladder
from pytest_llmperf.records.result import Check
from pytest_llmperf.report.page import IntervalChart
from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.run.case_charts import change_section
from tests.runs import ladder_run, result_of


def test_a_case_that_lost_memory_alone_is_not_shown_as_slower() -> None:
    result = result_of(next(one for one in ladder.LLAMA if one.number == "15.9"), 70_000)
    lost = Check(
        metric="peak_reserved_bytes", value=2.0, unit="bytes", baseline=1.0, tolerance=0.01, verdict="regressed"
    )
    checks = tuple(lost if check.metric == lost.metric else check for check in result.checks)
    section = change_section(RunDocument(ladder_run([replace(result, checks=checks, verdict="regressed")])).results)
    assert section is not None
    (chart,) = section.charts
    assert isinstance(chart, IntervalChart)
    assert [one.verdict for one in chart.intervals] == ["pass"]
