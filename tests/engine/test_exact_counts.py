"""Counts of a trace: what one launch decides without tolerance, and what is told beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf.judge.exact import StoredTrace, count_checks, trace_notes
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import formatted
from pytest_llmperf.records.trace import merged
from pytest_llmperf.run.findings import CaseFailedError
from pytest_llmperf.support import codec, formats
from tests.engine.conftest import SPEC, Engine
from tests.fakes import launch_of, trace_of
from tests.golden import Golden

KERNELS = {"kernel": {"gemm": 200, "norm": 33}, "copy": {"Memcpy HtoD": 2}, "wait": {"cudaStreamSynchronize": 6}}


def with_(**more: dict[str, float]) -> dict[str, dict[str, float]]:
    return {kind: {**names, **more.get(kind, {})} for kind, names in KERNELS.items()}


EXCHANGES = {"exchange": {"all_gather": 8}, "payload": {"all_gather": 4096}}


@pytest.mark.parametrize(
    ("more", "moved"),
    [
        ({}, {}),
        (
            {"exchange": {"all_gather": 16}, "payload": {"all_gather": 8192}},
            {"collectives_per_step": "regressed", "collective_bytes_per_step": "regressed"},
        ),
        ({"payload": {"all_gather": 8192}}, {"collective_bytes_per_step": "regressed"}),
        (
            {"exchange": {"all_gather": 4}, "payload": {"all_gather": 2048}},
            {"collectives_per_step": "changed", "collective_bytes_per_step": "changed"},
        ),
        # As many of another kind.
        ({"exchange": {"all_reduce": 8}}, {"collectives_per_step": "changed"}),
    ],
)
def test_one_launch_condemns_more_or_larger_collectives(
    engine: Engine, more: dict[str, dict[str, float]], moved: dict[str, str]
) -> None:
    engine.record(trace={**KERNELS, **EXCHANGES})
    engine.fake(trace={**KERNELS, **EXCHANGES, **more})
    result = engine.check().result
    verdicts = {check.metric: check.verdict for check in result.checks if check.verdict not in (None, "pass")}
    assert verdicts == moved


def test_a_baseline_that_tells_of_no_collectives_holds_none(recorded: Engine) -> None:
    recorded.fake(trace={**KERNELS, **EXCHANGES})
    result = recorded.check().result
    check = result.check("collectives_per_step")
    assert check is not None
    assert (result.verdict, check.value, check.verdict) == ("pass", 8, None)


@pytest.fixture
def recorded(engine: Engine) -> Engine:
    engine.record(trace=KERNELS)
    return engine


def test_the_same_counts_pass_and_are_told(recorded: Engine) -> None:
    recorded.fake(trace=KERNELS)
    result = recorded.check().result
    assert result.verdict == "pass"
    told = {
        check.metric: (check.value, check.baseline) for check in result.checks if check.metric.endswith("_per_step")
    }
    assert told == {
        "kernels_per_step": (233, 233),
        "copies_per_step": (2, 2),
        "synchronisations_per_step": (6, 6),
    }


@pytest.mark.parametrize(
    ("trace", "metric", "said"),
    [
        (
            with_(wait={"cudaStreamSynchronize": 7}),
            "synchronisations_per_step",
            "more: cudaStreamSynchronize (1 a step)",
        ),
        (with_(copy={"Memcpy DtoH": 1}), "copies_per_step", "more: Memcpy DtoH (1 a step)"),
    ],
)
def test_one_launch_condemns_a_wait_or_a_copy_more(
    recorded: Engine, trace: dict[str, Any], metric: str, said: str
) -> None:
    recorded.fake(trace=trace)
    concluded = recorded.check()
    assert (concluded.fails, concluded.result.verdict) == (True, "regressed")
    assert concluded.result.reason.startswith(metric)
    check = concluded.result.check(metric)
    assert check is not None
    assert check.detail == said
    assert len(concluded.result.launches) == 1


def test_of_many_kernels_that_came_those_are_named_that_moved_most(recorded: Engine, golden: Golden) -> None:
    recorded.fake(trace=with_(kernel={f"k{number}": number for number in range(1, 6)}))
    check = recorded.check().result.check("kernels_per_step")
    assert check is not None
    golden(check.detail)


def test_graph_breaks_more_are_a_loss(engine: Engine) -> None:
    engine.record(trace=KERNELS, evidence={"graph_breaks": 1})
    engine.fake(trace=KERNELS, evidence={"graph_breaks": 2})
    assert engine.check().result.verdict == "regressed"


@pytest.mark.parametrize("counted", ["graph_breaks", "recompilations", "allocator_retries"])
def test_what_is_counted_without_a_trace_gates_launches_that_have_none(engine: Engine, counted: str) -> None:
    engine.record(trace=KERNELS, evidence={counted: 0})
    engine.fake(evidence={counted: 3})
    result = engine.check().result
    assert (result.verdict, len(result.launches)) == ("regressed", 1)
    assert result.reason.startswith(f"{counted} 3")


def test_launches_whose_versions_nobody_knows_gate_nothing(recorded: Engine, golden: Golden) -> None:
    (path,) = recorded.baselines
    document = json.loads(path.read_text())
    stored = codec.read(StoredTrace, document["trace"])
    document["trace"] = codec.plain(replace(stored, versions={}))
    path.write_text(json.dumps(document))
    recorded.fake(trace=with_(wait={"cudaStreamSynchronize": 9}))
    result = recorded.check().result
    assert result.verdict == "pass"
    golden(result.notes)


def test_of_launches_that_differ_the_one_nearest_to_the_baseline_is_told(engine: Engine) -> None:
    engine.record(trace=KERNELS)
    engine.fake(sequence=[{"trace": with_(kernel={"norm": 23})}, {"trace": with_(kernel={"norm": 13})}])
    result = engine.check(launches=2, max_launches=2).result
    check = result.check("kernels_per_step")
    assert check is not None
    assert (check.verdict, check.value) == ("changed", 223)


def test_another_number_of_kernels_at_the_same_speed_is_changed_and_fails_only_a_strict_run(
    recorded: Engine, golden: Golden
) -> None:
    recorded.fake(trace=with_(kernel={"norm": 0.5, "elementwise": 99}))
    loose, strict = recorded.check(), recorded.check(strict=True)
    assert (loose.result.verdict, loose.fails, strict.fails) == ("changed", False, True)
    check = loose.result.check("kernels_per_step")
    assert check is not None
    golden(check.detail)


def test_fewer_waits_are_a_change_and_no_loss(recorded: Engine) -> None:
    recorded.fake(trace=with_(wait={"cudaStreamSynchronize": 5}))
    assert recorded.check().result.verdict == "changed"


def test_what_changed_is_recorded_with_a_reason_alone(recorded: Engine, golden: Golden) -> None:
    recorded.fake(trace=with_(kernel={"more": 1}))
    refused = recorded.check(update="all")
    golden(refused.refused)
    assert refused.result.verdict == "changed"
    assert recorded.check(update="all", reason="fused norms").result.updated
    assert recorded.check().result.verdict == "pass"


def test_launches_without_a_trace_leave_the_stored_one(recorded: Engine) -> None:
    recorded.fake()
    assert recorded.check(update="all").result.verdict == "pass"
    recorded.fake(trace=with_(wait={"cudaStreamSynchronize": 9}))
    assert recorded.check().result.verdict == "regressed"


def test_launches_of_another_speed_bring_their_own_trace_or_none(recorded: Engine) -> None:
    recorded.fake(step_seconds=1.0)
    assert recorded.check(update="all", reason="another algorithm").result.updated
    (path,) = recorded.baselines
    assert "trace" not in json.loads(path.read_text())


def test_with_other_versions_counts_are_news_and_no_gate(recorded: Engine, golden: Golden) -> None:
    recorded.fake(trace=with_(kernel={"norm": 43}, wait={"cudaStreamSynchronize": 9}), versions={"torch": "2.1"})
    result = recorded.check().result
    assert result.verdict == "pass"
    (line,) = (note for note in result.notes if note.startswith("a step has"))
    golden(line)


def test_as_many_kernels_of_other_names_are_changed(recorded: Engine, golden: Golden) -> None:
    recorded.fake(trace={**KERNELS, "kernel": {"gemm_b": 200, "norm": 33}})
    result = recorded.check().result
    assert result.verdict == "changed"
    golden.lines(result.reason, "kernels_per_step 233 as")
    assert recorded.check(strict=True).fails
    assert recorded.check(update="all", reason="another gemm").result.updated
    assert recorded.check().result.verdict == "pass"


def test_kernels_that_were_chosen_by_timing_them_gate_nothing(recorded: Engine) -> None:
    evidence = {"torch_compile_mode": "max-autotune"}
    recorded.fake(trace=with_(kernel={"norm": 43}), evidence=evidence)
    assert recorded.check().result.check("kernels_per_step").verdict is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("variables", "evidence", "is_timed"),
    [
        ({}, {"compiled_graphs": 1}, False),
        ({"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}, {"compiled_graphs": 1}, True),
        ({"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1"}, {"compiled_graphs": 0}, False),
        ({}, {"device_type": "cuda", "setup": {"torch": {"cudnn_benchmark": True}}}, True),
    ],
)
def test_an_environment_that_times_kernels_gates_no_names_of_them(
    recorded: Engine, variables: dict[str, str], evidence: dict[str, Any], is_timed: bool
) -> None:
    then = recorded.check().result.launches[-1]
    recorded.fake(trace={**KERNELS, "kernel": {"gemm_b": 200, "norm": 33}})
    now, stored = recorded.check().result.launches[-1], StoredTrace.of([then])
    around = replace(now.environment, variables=variables)
    launch = replace(now, environment=around, evidence={**now.evidence, **evidence})
    (check,) = [each for each in count_checks([launch], stored) if each.metric == "kernels_per_step"]
    assert check.verdict == ("pass" if is_timed else "changed")
    assert any("this environment chose by time" in note for note in trace_notes([launch], stored)) is is_timed


def test_a_baseline_of_before_exchanges_were_counted_has_the_same_kernels(recorded: Engine) -> None:
    then = recorded.check().result.launches[-1]
    recorded.fake(trace={**KERNELS, "exchange": {"all_reduce": 2}, "payload": {"all_reduce": 4096}})
    now, stored = recorded.check().result.launches[-1], StoredTrace.of([then])
    around = replace(now.environment, variables={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    launch = replace(now, environment=around, evidence={**now.evidence, "compiled_graphs": 1})
    assert not trace_notes([launch], stored)


def test_a_baseline_of_before_traces_gates_no_count(engine: Engine) -> None:
    engine.record()
    engine.fake(trace=KERNELS)
    result = engine.check().result
    assert result.verdict == "pass"
    assert result.check("kernels_per_step").baseline is None  # type: ignore[union-attr]


def test_an_edited_trace_is_refused_by_its_file(recorded: Engine, golden: Golden) -> None:
    (path,) = recorded.baselines
    document = json.loads(path.read_text())
    document["trace"]["rows"]["wait"]["cudaStreamSynchronize"][0] = 9
    path.write_text(json.dumps(document))
    with pytest.raises(CaseFailedError) as raised:
        recorded.check()
    golden(raised)


@pytest.mark.parametrize(
    "broken", [{"versions": ["torch"]}, {"versions": None}, {"counts": [1]}, {"counts": {"graph_breaks": None}}]
)
def test_a_broken_trace_is_refused_by_its_file(recorded: Engine, broken: dict[str, Any]) -> None:
    (path,) = recorded.baselines
    document = json.loads(path.read_text())
    document["trace"] |= broken
    path.write_text(json.dumps(document))
    with pytest.raises(CaseFailedError, match=r"trace: (versions|counts)"):
        recorded.check()


def test_a_stored_trace_is_one_line_a_kernel(recorded: Engine) -> None:
    (path,) = recorded.baselines
    assert '    "gemm": [200.0, 0.2],\n    "norm": [33.0, 0.033]\n' in path.read_text()


def test_untraced_launches_of_a_run_that_wants_none_say_nothing(recorded: Engine) -> None:
    recorded.fake()
    assert recorded.check(trace=False).result.notes == ()


def test_what_fits_the_part_that_moved_is_told_first_and_in_the_first_line(engine: Engine, golden: Golden) -> None:
    gemms = {"kernel": {"nvjet": 200, "_rms_norm_kernel": 33}}
    engine.record(trace=gemms, versions={"accelerate": "1", "liger-kernel": "0.8"})
    fewer = {"kernel": {"nvjet": 200, "elementwise": 66}, "wait": {"cudaStreamSynchronize": 1}}
    engine.fake(trace=fewer, evidence={"liger_note": "no norm"}, versions={"accelerate": "1", "liger-kernel": "0.8"})
    result = engine.check().result
    assert result.verdict == "regressed"
    golden(result.diagnosis)


def test_a_kernel_more_on_one_rank_of_32_is_seen_in_the_figures(golden: Golden) -> None:
    def launch(counts: Sequence[int]) -> Launch:
        traces = [trace_of({"kernel": {"gemm": 2000, "norm": count}}) for count in counts]
        return replace(launch_of(SPEC), trace=merged(traces))

    stored, now = launch([33] * 32), launch([33] * 31 + [34])
    (check,) = (each for each in count_checks([now], StoredTrace.of([stored])) if each.metric == "kernels_per_step")
    assert check.verdict == "changed"
    golden(check.detail)
    assert formats.in_sentence(check.value, check.unit) == "2,033.031"
    assert formatted(check.metric, check.value, check.unit) == "2,033.031"
    assert formatted(check.metric, check.baseline, check.unit) == "2,033"
