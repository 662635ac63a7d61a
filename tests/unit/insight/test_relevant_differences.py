"""Which of the things that are not as they were may have moved what moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_llmperf.analysis.step_difference import ranked, relevant, step_difference
from pytest_llmperf.records.trace import Trace
from tests.fakes import trace_of

LINES = (
    "CUDA_LAUNCH_BLOCKING: none -> 1",
    "NCCL_ALGO: Ring -> Tree",
    "liger_forwards LigerRMSNorm.forward: 33 -> none",
    "tf32: True -> False",
    "torch: 2.11 -> 2.12",
)
STEP = trace_of({"kernel": {"nvjet": 100, "_rms_norm_kernel": 33}})


def slower(**seconds: float) -> Trace:
    return replace(STEP, **{name: getattr(STEP, name) + more for name, more in seconds.items()})


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (slower(step_seconds=0.05), ("CUDA_LAUNCH_BLOCKING: none -> 1",)),
        (
            trace_of({"kernel": {"nvjet": 150, "_rms_norm_kernel": 33}}),
            ("tf32: True -> False", "torch: 2.11 -> 2.12"),
        ),
        (
            trace_of({"kernel": {"nvjet": 100, "a_kernel": 90}}),
            ("liger_forwards LigerRMSNorm.forward: 33 -> none",),
        ),
        (slower(step_seconds=0.05, data_seconds=0.05), ()),
        (STEP, ()),
    ],
)
def test_a_difference_is_told_where_the_part_that_it_is_of_moved(after: Trace, said: tuple[str, ...]) -> None:
    difference = step_difference(STEP, after)
    assert relevant(LINES, difference) == said
    assert ranked(LINES, difference)[: len(said)] == said
    assert sorted(ranked(LINES, difference)) == sorted(LINES)
