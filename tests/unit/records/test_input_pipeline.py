"""The input pipeline: what it is called, what of it must have been there, and for how long a step waits for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.analysis.waits import data_wait
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.run import derived_metrics
from pytest_llmperf.run.baseline_comparison import steps_notes
from pytest_llmperf.run.derived_metrics import ModelFlops
from pytest_llmperf.settings.registry import Evidence, contradictions, declarable, small, why_skip
from tests.fakes import evidence_of, launch_of, trace_of
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny", data="text", rows="padded")
FLY = replace(SPEC, tokenise="on_the_fly")


def said(spec: TrainSpec, *inactive: str, **seen: Any) -> list[str]:
    return [*contradictions(spec, Evidence.read({**evidence_of(spec), **seen}), frozenset(inactive))]


def test_an_id_tells_what_is_not_the_default() -> None:
    full = replace(FLY, data_workers=2, data_prefetch=4, data_pinned=False)
    assert full.id == SPEC.id.replace("-gpus1", "-on_the_fly-workers2-prefetch4-unpinned-gpus1")


def test_a_small_training_has_no_text_and_nobody_who_fetches() -> None:
    full = replace(FLY, data_workers=2, data_prefetch=4, data_pinned=False, split="train[:50%]")
    assert small(full) == small(TrainSpec(model="llama-tiny"))


def test_on_a_cpu_there_is_nothing_to_pin(golden: Golden) -> None:
    unpinned = replace(SPEC, data_pinned=False)
    why = why_skip(unpinned, num_gpus=0, num_cores=2)
    assert why is not None
    golden(why)
    for spec in (SPEC, unpinned):
        assert said(spec) == said(spec, "data_pinned") == []
    assert "data_pinned" in declarable()


@pytest.mark.parametrize(
    ("spec", "seen", "line"),
    [
        (SPEC, {"data_workers": 2}, "asked for data workers 0, the run had 2"),
        (replace(SPEC, data_workers=2), {"data_workers": 0}, "asked for data workers 2, the run had 0"),
        (
            replace(SPEC, data_workers=2, data_prefetch=4),
            {"data_prefetch": 2},
            "asked for a prefetch of 4, the run had 2",
        ),
        (SPEC, {"device_type": "cuda", "data_pinned": False}, "asked for pinned batches True, the run had False"),
        (
            replace(SPEC, data_pinned=False),
            {"device_type": "cuda", "data_pinned": True},
            "asked for pinned batches False, the run had True",
        ),
        (FLY, {"tokenised_by": "nobody"}, "asked for tokens on the fly by the rank, made by nobody"),
        (FLY, {"tokenised_by": "workers"}, "asked for tokens on the fly by the rank, made by workers"),
        (SPEC, {"tokenised_by": "rank"}, "asked for tokens ahead, made on the fly by the rank"),
        (
            replace(FLY, data_workers=2),
            {"tokenised_by": "rank and workers"},
            "asked for tokens on the fly by the workers, made by rank and workers",
        ),
    ],
)
def test_what_was_asked_for_and_not_there_is_told(spec: TrainSpec, seen: dict[str, Any], line: str) -> None:
    assert said(spec) == []
    assert said(spec, **seen) == [line]


def test_records_from_before_had_what_is_the_default_now(golden: Golden) -> None:
    old = {name: value for name, value in evidence_of(SPEC).items() if not name.startswith(("data_", "tokenised"))}
    for device in ("cpu", "cuda"):
        assert [*contradictions(SPEC, Evidence.read({**old, "device_type": device}), frozenset())] == []
    golden([*contradictions(replace(FLY, data_workers=1), Evidence.read(old), frozenset())])


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
    assert [line for line in steps_notes([launch], None, Policy.for_gpu()) if "data" in line] == notes
    shown = {check.metric: check for check in derived_metrics.figures(SPEC, (launch,), ModelFlops())}
    seconds, share = shown["data_wait_seconds"], shown["data_wait_share"]
    assert (seconds.value, share.value, seconds.gates or share.gates) == (data, data / (0.05 + data), False)
