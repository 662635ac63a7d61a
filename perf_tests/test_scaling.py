"""More GPUs hold their throughput, their memory and their efficiency."""

from __future__ import annotations

from perf_tests.scaling import Width
from pytest_llmperf import Perf


def test_weak(perf: Perf, weak: Width) -> None:
    perf.check(weak.spec)


def test_sharded(perf: Perf, sharded: Width) -> None:
    perf.check(sharded.spec, scaled_from=sharded.scaled_from)


def test_strong(perf: Perf, strong: Width) -> None:
    perf.check(strong.spec, scaled_from=strong.scaled_from)
