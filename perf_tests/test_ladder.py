"""Every rung of the chapter's ladder holds its throughput and memory."""

from __future__ import annotations

from perf_tests.ladder import Rung
from pytest_llmperf import Perf


def test_rung(perf: Perf, rung: Rung) -> None:
    perf.check(rung.spec)
