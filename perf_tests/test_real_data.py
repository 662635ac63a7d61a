"""Training on a text holds its throughput, in slots and in real tokens, and its memory."""

from __future__ import annotations

from perf_tests.real_data import TextCase
from pytest_llmperf import Perf


def test_real_data(perf: Perf, text_case: TextCase) -> None:
    perf.check(text_case.spec)
