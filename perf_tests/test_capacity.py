"""The largest micro-batch that trains has not become smaller."""

from __future__ import annotations

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.plugin.perf import Perf
from pytest_llmperf.plugin.session import SESSION


def test_largest(request: pytest.FixtureRequest, perf: Perf, largest: TrainSpec) -> None:
    if request.config.stash[SESSION].on_cpu:
        pytest.skip("the chapter's models are for a GPU")
    perf.max_micro_batch(largest)
