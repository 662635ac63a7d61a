"""What a dry run says of the cases that it plans."""

from __future__ import annotations

import pytest

from pytest_llmperf.records.results_document import Planned
from pytest_llmperf.run.whole_run import plan_lines

HALF_AN_HOUR = Planned(id="a-gpus2", nodeid="test_a", width=2, launches=1, gpus=2, seconds=1800.0)


@pytest.mark.parametrize(("budget", "is_over"), [(None, False), (1.01, False), (1.0, False), (0.99, True)])
def test_a_plan_that_uses_its_budget_up_is_not_over_it(budget: float | None, is_over: bool) -> None:
    lines = plan_lines([HALF_AN_HOUR], budget)
    assert ("over the budget of --perf-budget" in lines) is is_over
