"""What is faster learns the same, tensor by tensor; it needs no baseline."""

from __future__ import annotations

from pytest_llmperf import Perf, TrainSpec


def test_parity(perf: Perf, made_small: TrainSpec) -> None:
    perf.same_training(made_small)
