"""For how long a step waits for its data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.analysis.waits import data_wait
from pytest_llmperf.judge.beside_baseline import steps_notes
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.run.derived_metrics import ModelFlops
from tests.fakes import launch_of, trace_of

SPEC = TrainSpec(model="llama-tiny", data="text", rows="padded")
waits = st.floats(0, 10)


@given(st.lists(st.tuples(waits, st.floats(0.001, 10)), min_size=1, max_size=5))
def test_a_share_is_of_the_step_and_no_more_than_the_worst_launch_has(pairs: list[tuple[float, float]]) -> None:
    made = trace_of({"kernel": {"gemm": 1}})
    launches = [
        replace(launch_of(SPEC), trace=replace(made, data_seconds=data, step_seconds=data + rest))
        for data, rest in pairs
    ]
    found = data_wait(launches)
    assert found is not None
    shares = [data / (data + rest) for data, rest in pairs]
    seconds, share = found
    assert min(shares) <= share <= max(shares) < 1
    assert min(data for data, _ in pairs) <= seconds <= max(data for data, _ in pairs)


def test_where_no_launch_has_a_trace_nobody_knows() -> None:
    assert data_wait([replace(launch_of(SPEC), trace=replace(trace_of({}), none="lost"))]) is None


@pytest.mark.parametrize(("data", "notes"), [(0.035, ["waits for data: 35 ms a step (41 % of it)"]), (0.0025, [])])
def test_a_verdict_tells_how_long_a_step_waits_for_data(data: float, notes: list[str]) -> None:
    trace = replace(trace_of({"kernel": {"gemm": 50}}), data_seconds=data, step_seconds=0.05 + data)
    launch = replace(launch_of(SPEC), trace=trace)
    assert [
        line for line in steps_notes([launch], None, Policy.for_gpu(), data_wait([launch])) if "data" in line
    ] == notes
    shown = {check.metric: check for check in ModelFlops().figures(SPEC, (launch,))}
    seconds, share = shown["data_wait_seconds"], shown["data_wait_share"]
    assert (seconds.value, share.value, seconds.gates or share.gates) == (data, data / (0.05 + data), False)
