"""Every optimisation beside the ladder's is active, and holds its throughput and memory."""

from __future__ import annotations

from perf_tests.optimisations import Optimisation
from pytest_llmperf import Perf


def test_optimisation(perf: Perf, optimisation: Optimisation) -> None:
    perf.check(optimisation.spec)
