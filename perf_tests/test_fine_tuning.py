"""Every way of fine-tuning is active, and holds its throughput and memory."""

from __future__ import annotations

from perf_tests.fine_tuning import FineTuning
from pytest_llmperf import Perf


def test_fine_tuning(perf: Perf, fine_tuning: FineTuning) -> None:
    perf.check(fine_tuning.spec)
