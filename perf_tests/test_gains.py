"""Every step of the ladder brings what it is there for, whatever the hardware."""

from __future__ import annotations

import pytest

from perf_tests.gains import Gain, specs_of
from pytest_llmperf import Perf, on_cpu


def test_gain(request: pytest.FixtureRequest, perf: Perf, gain: Gain) -> None:
    cpu = on_cpu(request.config)
    bounds = gain.cpu_bounds if cpu else gain.bounds
    perf.compare(*specs_of(gain, cpu), **(bounds or {}))
