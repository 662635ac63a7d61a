"""The statistics of launches. The unit of evidence is a launch: its steps share a host, an allocator and clocks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from pytest_llmperf.measurement import Launch


def pooled_step_seconds(launches: Sequence[Launch]) -> float:
    """Step time of a measurement, in seconds: the geometric mean of its launches' medians.

    The logarithm is the scale on which a change of +5 % and one of -5 % weigh the same.
    """
    return geometric_mean(launch.median_step_seconds for launch in launches)


def pooled_first_step_seconds(launches: Sequence[Launch]) -> float:
    """The first step's time, in seconds, pooled as steps are."""
    return geometric_mean(launch.first_step_seconds for launch in launches)


def pooled_tokens_per_second(launches: Sequence[Launch]) -> float:
    """Throughput over all ranks, in tokens/s."""
    return launches[0].tokens_per_step / pooled_step_seconds(launches)
