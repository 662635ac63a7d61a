"""The largest micro-batch that trains has not become smaller."""

from __future__ import annotations

import pytest

from pytest_llmperf import Perf, TrainSpec, on_cpu


def test_largest(request: pytest.FixtureRequest, perf: Perf, largest: TrainSpec) -> None:
    if on_cpu(request.config):
        pytest.skip("the chapter's models are for a GPU")
    perf.max_micro_batch(largest)
