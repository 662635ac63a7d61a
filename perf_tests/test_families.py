"""Models of other families hold their throughput and memory."""

from __future__ import annotations

from perf_tests.families import Family
from pytest_llmperf import Perf


def test_family(perf: Perf, family: Family) -> None:
    perf.check(family.spec)
