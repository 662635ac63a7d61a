"""What is predicted to fit a long context trains and holds its throughput and memory, and what is not does not."""

from __future__ import annotations

from perf_tests.fine_tuning import FineTuning
from pytest_llmperf import Perf


def test_length(perf: Perf, long_context: FineTuning) -> None:
    perf.check(long_context.spec)
