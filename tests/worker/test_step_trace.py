"""From what the profiler saw to a trace, or to why there is none."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.store import dump
from pytest_llmperf.records.trace import Trace, TraceRow, merged, short_name
from pytest_llmperf.support import codec

pytest.importorskip("torch")

import torch

from pytest_llmperf.observe import tracer
from pytest_llmperf.observe.tracer import (
    Activities,
    Call,
    IncompleteTraceError,
    Marks,
    Work,
    read,
    step_trace,
)

STEP = 1_000_000  # nanoseconds


@dataclass(frozen=True)
class Event:
    """As Kineto words one."""

    said: str
    start: int
    length: int
    device: str = "CUDA"
    correlation: int = 0
    annotation: bool = False

    def name(self) -> str:
        return self.said

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.length

    def device_type(self) -> Any:
        return SimpleNamespace(name=self.device)

    def correlation_id(self) -> int:
        return self.correlation

    def start_thread_id(self) -> int:
        return 1

    def is_user_annotation(self) -> bool:
        return self.annotation


def traced(names: list[str], steps: int = 3, *, waits: int = 0) -> tuple[Activities, Marks]:
    """Each step asks for these, one after the other, and they begin a little later."""
    found, number = Activities([], []), 0
    for step in range(steps):
        for index, name in enumerate(names):
            number += 1
            asked = step * STEP + 1000 * (index + 1)
            found.calls.append(Call("cudaLaunchKernel", asked, asked + 10, number))
            found.work.append(Work("kernel", name, asked + 500, asked + 900, number))
        for wait in range(waits):
            asked = step * STEP + STEP // 2 + wait
            found.calls.append(Call("cudaStreamSynchronize", asked, asked + 100, 10_000 + number * 100 + wait))
    return found, Marks(
        [step * STEP for step in range(steps + 1)], [(step * STEP, step * STEP + 50) for step in range(steps)]
    )


@given(st.lists(st.sampled_from(["gemm", "norm", "copy_kernel"]), min_size=1, max_size=20), st.integers(0, 3))
def test_a_step_has_each_kernel_as_often_as_it_was_asked_for(names: list[str], waits: int) -> None:
    trace = step_trace(*traced(names, waits=waits), on_host=False)
    assert {(row.kind, row.name): row.count for row in trace.rows if row.kind == "kernel"} == {
        ("kernel", name): names.count(name) for name in names
    }
    assert trace.count("kernels_per_step") == len(names)
    assert trace.count("synchronisations_per_step") == waits
    assert trace.busy_seconds == pytest.approx(len(names) * 400e-9)
    assert trace.step_seconds == pytest.approx(STEP * 1e-9)
    assert trace.data_seconds == pytest.approx(50e-9)
    assert trace.idle_seconds == pytest.approx(trace.step_seconds - trace.busy_seconds - trace.data_seconds)


@given(st.lists(st.sampled_from(["gemm", "norm"]), min_size=1, max_size=9), st.data())
def test_a_record_that_the_profiler_lost_is_never_a_smaller_count(names: list[str], data: st.DataObject) -> None:
    found, marks = traced(names)
    which = found.work if data.draw(st.booleans()) else found.calls
    del which[data.draw(st.integers(0, len(which) - 1))]
    with pytest.raises(IncompleteTraceError):
        step_trace(found, marks, on_host=False)


def test_a_step_whose_records_were_all_lost_is_none() -> None:
    found, marks = traced(["gemm", "norm"])
    rest = Activities(found.work[2:], found.calls[2:])
    with pytest.raises(IncompleteTraceError, match=r"not alike \(0 and 1 of kernel gemm\)"):
        step_trace(rest, marks, on_host=False)


def test_work_of_other_steps_alone_is_no_trace() -> None:
    found, _ = traced(["gemm"])
    with pytest.raises(IncompleteTraceError, match="of no traced step"):
        step_trace(found, Marks([90 * STEP, 91 * STEP, 92 * STEP], []), on_host=False)


def test_no_work_at_all_is_no_trace() -> None:
    _, marks = traced(["gemm"])
    with pytest.raises(IncompleteTraceError, match="saw no kernel"):
        step_trace(Activities([], []), marks, on_host=False)


def test_what_was_asked_for_before_and_after_is_of_no_step() -> None:
    found, marks = traced(["gemm"])
    found.calls.extend(
        [Call("cudaLaunchKernel", -5, 0, 901), Call("cudaLaunchKernel", 3 * STEP + 5, 3 * STEP + 9, 902)]
    )
    found.work.extend([Work("kernel", "early", 10, 20, 901), Work("kernel", "late", 3 * STEP + 90, 3 * STEP + 95, 902)])
    assert [row.name for row in step_trace(found, marks, on_host=False).rows] == ["gemm"]


def test_kernels_of_one_graph_share_its_launch() -> None:
    found = Activities([], [])
    for step in range(3):
        found.calls.append(Call("cudaGraphLaunch", step * STEP + 10, step * STEP + 20, step + 1))
        found.work.extend(Work("kernel", name, step * STEP + 30, step * STEP + 40, step + 1) for name in ("a", "b"))
    marks = Marks([0, STEP, 2 * STEP, 3 * STEP], [])
    assert step_trace(found, marks, on_host=False).count("kernels_per_step") == 2


def test_an_exchange_is_exposed_where_nothing_computes_beside_it() -> None:
    found, marks = traced(["gemm"])
    for step in range(3):
        asked = step * STEP + 2000
        found.calls.append(Call("cudaLaunchKernel", asked, asked + 10, 500 + step))
        # The gemm is busy from 1500 to 1900.
        found.work.append(Work("collective", "ncclAllReduce", step * STEP + 1700, step * STEP + 2900, 500 + step))
    assert step_trace(found, marks, on_host=False).exposed_seconds == pytest.approx(1000e-9)


def test_the_allocator_may_ask_the_driver_in_one_step_and_not_in_another() -> None:
    found, marks = traced(["gemm"])
    found.calls.append(Call("cudaMalloc", 100, 200, 999))
    assert step_trace(found, marks, on_host=False).counts == {("kernel", "gemm"): 1.0}


def test_what_the_allocator_asks_in_any_step_is_kept_as_the_mean_of_all() -> None:
    found, marks = traced(["gemm"])
    found.calls.extend(Call("cudaFree", 2 * STEP + at, 2 * STEP + at + 300, 900 + at) for at in (100, 500))
    rows = {row.name: row for row in step_trace(found, marks, on_host=False).rows if row.kind == "allocation"}
    assert rows["cudaFree"].count == pytest.approx(2 / 3)
    assert rows["cudaFree"].seconds == pytest.approx(200e-9)


def test_an_operator_takes_what_those_that_it_calls_leave() -> None:
    work = []
    for step in range(3):
        at = step * STEP
        work += [
            Work("operator", "aten::linear", at + 10, at + 110, 1),
            Work("operator", "aten::mm", at + 20, at + 100, 1),
        ]
        work += [Work("operator", "aten::mul", at + 30, at + 60, 2)]  # on another thread
    trace = step_trace(Activities(work, []), Marks([0, STEP, 2 * STEP, 3 * STEP], []), on_host=True)
    assert {row.name: row.seconds for row in trace.rows} == pytest.approx(
        {"aten::linear": 20e-9, "aten::mm": 80e-9, "aten::mul": 30e-9}
    )
    assert trace.is_on_host
    assert (trace.busy_seconds, trace.idle_seconds) == pytest.approx((130e-9, STEP * 1e-9 - 130e-9))
    assert trace.count("operators_per_step") == 3


def test_on_a_host_what_copies_and_what_asks_for_a_content_count_as_on_a_device() -> None:
    names = ("aten::mm", "aten::item", "aten::_local_scalar_dense", "aten::_to_copy", "aten::copy_")
    found = read([Event(name, 1, 2, device="CPU") for name in names], on_host=True)
    assert [work.kind for work in found.work] == ["operator", "operator", "wait", "operator", "copy"]


def test_on_a_host_exchanges_take_as_long_as_any_of_them_is_under_way() -> None:
    events = [Event("aten::mm", step * STEP + 10, 20, device="CPU") for step in range(3)]
    events += [
        Event("gloo:all_reduce", step * STEP + at, 600, device="CPU", annotation=True)
        for step in range(3)
        for at in (100, 300)
    ]
    events += [Event("gloo:all_reduce", 3 * STEP - 100, 600, device="CPU")]
    trace = step_trace(read(events, on_host=True), Marks([0, STEP, 2 * STEP, 3 * STEP], []), on_host=True)
    assert trace.exchange_seconds == pytest.approx((3 * 800 + 100) / 3 * 1e-9)
    assert [row.name for row in trace.rows] == ["aten::mm"]


def test_on_a_host_the_next_batch_is_waited_for_too() -> None:
    work = [Work("operator", "aten::mm", step * STEP + 600, step * STEP + 700, 1) for step in range(3)]
    windows = [(step * STEP, step * STEP + 500) for step in range(3)]
    trace = step_trace(Activities(work, []), Marks([0, STEP, 2 * STEP, 3 * STEP], windows), on_host=True)
    assert (trace.data_seconds, trace.busy_seconds) == pytest.approx((500e-9, 100e-9))
    assert trace.idle_seconds == pytest.approx(STEP * 1e-9 - 600e-9)


def test_on_a_host_what_the_loader_does_is_of_no_step() -> None:
    # Of two workers' batches one step may take in both, and the next one none.
    work = [Work("operator", "aten::mm", step * STEP + 600, step * STEP + 700, 1) for step in range(3)]
    work += [Work("operator", "aten::empty", at, at + 20, 1) for at in (100, 150, 2 * STEP + 100)]
    windows = [(step * STEP, step * STEP + 500) for step in range(3)]
    marks = Marks([0, STEP, 2 * STEP, 3 * STEP], windows, windows)
    trace = step_trace(Activities(work, []), marks, on_host=True)
    assert [(row.name, row.count) for row in trace.rows] == [("aten::mm", 1)]


def test_events_are_told_apart_by_what_they_are() -> None:
    events = [
        Event("_rms_norm_backward_kernel", 5, 10, correlation=1),
        Event("Memcpy HtoD (Pinned -> Device)", 5, 10, correlation=2),
        Event("Memset (Device)", 5, 10, correlation=3),
        Event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 5, 10, correlation=4),
        Event("ProfilerStep#1", 5, 10, annotation=True),
        Event("cudaLaunchKernel", 1, 2, device="CPU", correlation=1),
        Event("cuLaunchKernelEx", 1, 2, device="CPU", correlation=1),
        Event("aten::mm", 1, 2, device="CPU"),
        Event("current", 1, 2, device="CPU"),
    ]
    found = read(events, on_host=False)
    assert [work.kind for work in found.work] == ["kernel", "copy", "fill", "collective"]
    assert [call.name for call in found.calls] == ["cudaLaunchKernel", "cuLaunchKernelEx"]
    assert [work.name for work in read(events, on_host=True).work] == ["aten::mm"]


@given(st.text(min_size=1, max_size=6000))
def test_a_name_is_one_line_that_is_read_and_still_its_own(name: str) -> None:
    short = short_name(name)
    assert len(short) <= 240
    assert "\n" not in short
    assert short_name(short) == short
    assert len(name) <= 240 or short_name(name + "x") != short


ROWS = st.lists(
    st.builds(
        TraceRow,
        st.sampled_from(["kernel", "copy", "wait"]),
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=300),
        st.integers(1, 10_000).map(float),
        st.floats(0, 10),
    ),
    max_size=8,
    unique_by=lambda row: (row.kind, row.name),
)


@given(ROWS, st.floats(0, 10), st.integers(1, 32))
def test_a_trace_is_read_as_it_was_written(rows: list[TraceRow], seconds: float, ranks: int) -> None:
    trace = Trace(rows=tuple(sorted(rows)), steps=3, ranks=ranks, step_seconds=seconds, busy_seconds=seconds)
    assert codec.read(Trace, codec.plain(trace)) == trace
    assert codec.read(Trace, codec.plain(Trace(none="why"))) == Trace(none="why")


@pytest.mark.parametrize(
    "broken",
    [
        {"rows": {"kernel": {"a": [0, 1.0]}}},
        {"rows": {"kernel": {"a": [1, -1.0]}}},
        {"rows": {"karnel": {"a": [1, 1.0]}}},
        {"rows": {"kernel": {"a": 3}}},
        {"rows": []},
        {"rows": {"kernel": {"a": [math.inf, 1.0]}}},
        {"rows": {"kernel": {"a": [1, math.inf]}}},
        {"rows": {"kernel": {"a": [1e308, 1.0]}}},
        {"steps": "many"},
        {"steps": 0},
        {"steps": math.inf},
        {"ranks": 0},
        {"step_seconds": math.nan},
        {"step_seconds": math.inf},
        {"busy_seconds": -1.0},
        {"more": 1},
    ],
)
def test_a_trace_that_somebody_broke_is_refused(broken: dict[str, Any]) -> None:
    whole = codec.plain(Trace(rows=(TraceRow("kernel", "a", 1.0, 1.0),), steps=3))
    with pytest.raises(ValueError, match=f"{next(iter(broken))}\\b.*(expected|unknown)"):
        codec.read(Trace, whole | broken)


def test_ranks_are_one_trace_and_those_that_differ_show_in_the_mean() -> None:
    one = Trace(
        rows=(TraceRow("kernel", "a", 2.0, 0.25), TraceRow("kernel", "b", 1.0, 0.125)), steps=3, step_seconds=1.0
    )
    other = replace(one, rows=(TraceRow("kernel", "a", 2.0, 0.75),), step_seconds=2.0)
    both = merged([one, other])
    assert both.rows == (TraceRow("kernel", "a", 2.0, 0.5), TraceRow("kernel", "b", 0.5, 0.0625))
    assert (both.ranks, both.step_seconds) == (2, 2.0)


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=33))
def test_ranks_that_differ_are_stored_as_the_next_launch_will_have_them(counts: list[int]) -> None:
    both = merged([Trace(rows=(TraceRow("kernel", "a", float(count), 0.1),), steps=3) for count in counts])
    stored = codec.read(Trace, json.loads(dump(codec.plain(both))))
    assert stored.counts == both.counts
    assert stored.count("kernels_per_step") == both.count("kernels_per_step")


def test_a_rank_without_a_trace_is_named() -> None:
    one = Trace(rows=(TraceRow("kernel", "a", 2.0, 0.2),), steps=3)
    assert merged([one, Trace(none="the profiler saw no kernel")]).none == "rank 1: the profiler saw no kernel"
    assert merged([Trace(none="it was lost")]).none == "it was lost"
    assert merged([one]) == one


def test_a_record_of_exchanges_that_cannot_be_read_costs_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(_: Any) -> bytes:
        raise AttributeError("_dump_fr_trace")  # as a torch that has none

    monkeypatch.setattr(tracer, "recorded", recorded)
    seen = tracer.Tracer(torch.device("cpu"))
    seen.begin()
    for _ in range(tracer.TRACED_STEPS):
        torch.ones(4, 4) @ torch.ones(4, 4)
        seen.end_step()
    trace = seen.trace(None, [0.1] * 4, 1)
    assert not trace.none
    assert {"exchange", "payload"}.isdisjoint(row.kind for row in trace.rows)
    assert any(row.name == "aten::mm" for row in trace.rows)
