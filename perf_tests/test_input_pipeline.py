"""However its batches come, a training on a text holds its throughput, and tells how long it waits for them."""

from __future__ import annotations

from pytest_llmperf import Perf, TrainSpec


def test_input_pipeline(perf: Perf, input_case: TrainSpec) -> None:
    perf.check(input_case)
