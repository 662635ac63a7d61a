"""Static figures: what moves decides without tolerance, other versions make news of it, and no edit goes unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.baseline import Baseline, StepBaseline, StoredStep
from pytest_llmperf.judge.static_steps import PEAK, judge_step, news
from pytest_llmperf.judge.store import BaselineError, parse, text_of
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.records.trace import StaticStep
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.fakes import STEP
from tests.golden import Golden

BASELINES = Path(__file__).parents[3] / "baselines"
STORED = StaticStep(**STEP)
SPEC = TrainSpec(model="llama-tiny")

counts = st.dictionaries(st.text(max_size=20), st.integers(0, 2**50), max_size=6)
steps = st.builds(
    StaticStep,
    operators=counts,
    flops=counts,
    memory=counts,
    versions=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
    exchanges=st.dictionaries(st.text(max_size=8), st.tuples(st.integers(0, 99), st.integers(0, 2**50)), max_size=3),
)


def now(**more: dict[str, Any]) -> StaticStep:
    """The stored step with other counts; one of 0 is gone."""
    values = {name: {**STEP[name], **more.get(name, {})} for name in STEP}
    kept: dict[str, Any] = {name: {key: n for key, n in each.items() if n} for name, each in values.items()}
    return StaticStep(**kept)


@given(steps)
def test_a_step_is_read_as_it_was_written(step: StaticStep) -> None:
    assert codec.read(StaticStep, json.loads(json.dumps(codec.plain(step)))) == step


@given(steps, st.sampled_from(["operators", "flops", "memory"]), st.integers(0, 2**50))
def test_no_edit_of_a_count_goes_unseen(step: StaticStep, field: str, count: int) -> None:
    values = json.loads(json.dumps(codec.plain(step)))
    if values[field].get("aten::mm") == count:
        return
    values[field]["aten::mm"] = count
    with pytest.raises(ValueError, match="were edited"):
        codec.read(StaticStep, values)


@given(steps)
def test_the_same_step_passes(step: StaticStep) -> None:
    judgement = judge_step(step, step)
    assert judgement.verdict == "pass"
    assert news(step, step) == ""


@pytest.mark.parametrize(
    ("moved", "verdict", "reason"),
    [
        ({"operators": {"aten::_to_copy": 27}}, "regressed", "copies a step +1 (+1 aten::_to_copy)"),
        ({"operators": {"aten::copy_": 2}}, "regressed", "copies a step +2 (+2 aten::copy_)"),
        ({"operators": {"aten::item": 2}}, "regressed", "synchronisations a step +1 (+1 aten::item)"),
        ({"flops": {"aten::mm": 24_000_000}}, "regressed", "arithmetic +12 MFLOP (aten::mm +12 MFLOP)"),
        (
            {"memory": {"activations": 2**31 + 2**29}},
            "regressed",
            "predicted memory +512.0 MiB (activations +512.0 MiB)",
        ),
        ({"operators": {"aten::_to_copy": 25}}, "changed", "copies a step -1 (-1 aten::_to_copy)"),
        ({"flops": {"aten::mm": 6_000_000}}, "changed", "arithmetic -6 MFLOP (aten::mm -6 MFLOP)"),
        ({"operators": {"aten::mm": 46}}, "changed", "operators a step +1 (+1 aten::mm)"),
        (
            {"operators": {"aten::mm": 44, "aten::bmm": 1}},
            "changed",
            "operators a step (+1 aten::bmm, -1 aten::mm)",
        ),
        ({"memory": {"activations": 2**30}}, "improved", "predicted memory -1.00 GiB (activations -1.00 GiB)"),
    ],
)
def test_what_moves_is_named_and_decides(moved: dict[str, Any], verdict: str, reason: str) -> None:
    judgement = judge_step(now(**moved), STORED)
    assert judgement.verdict == verdict
    assert judgement.reason == reason


def test_the_worst_of_what_moved_is_the_verdict() -> None:
    lost = now(operators={"aten::_to_copy": 59, "liger::_rms_norm_forward_kernel": 0}, memory={"activations": 2**30})
    assert judge_step(lost, STORED).verdict == "regressed"


SHARDED = replace(STORED, exchanges={"all_gather": (33, 2**32), "reduce_scatter": (17, 2**31)})


@pytest.mark.parametrize(
    ("moved", "verdict", "reason"),
    [
        (
            {"all_gather": (65, 2**33)},
            "regressed",
            "collectives a step +32 (+32 all_gather), bytes of collectives +4.00 GiB (all_gather +4.00 GiB)",
        ),
        (
            {"reduce_scatter": (17, 2**32)},
            "regressed",
            "bytes of collectives +2.00 GiB (reduce_scatter +2.00 GiB)",
        ),
        ({"all_gather": (32, 2**32)}, "changed", "collectives a step -1 (-1 all_gather)"),
    ],
)
def test_more_or_larger_collectives_regress(moved: dict[str, tuple[int, int]], verdict: str, reason: str) -> None:
    judgement = judge_step(replace(SHARDED, exchanges={**SHARDED.exchanges, **moved}), SHARDED)
    assert (judgement.verdict, judgement.reason) == (verdict, reason)


# As NCCL calls its kernels, and as they are told.
KINDS = {
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "Broadcast": "broadcast",
    "ReduceScatter": "reduce_scatter",
}


def stored_exchanges() -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """By case of several GPUs, what fake ranks tell, and how many of NCCL's kernels a traced step had."""
    found = {}
    for path in sorted(BASELINES.glob("*/*/*gpus[2-9]*.json")):
        baseline = parse(Baseline, path.read_text(encoding="utf-8"), str(path))
        if baseline.static and baseline.trace:
            ran = {
                KINDS[row.name.split("_")[1]]: row.count
                for row in baseline.trace.trace.rows
                if row.kind == "collective"
            }
            told = {name: count for name, (count, _) in baseline.static.step.exchanges.items()}
            found[path.stem] = told, ran
    return found


def test_what_is_told_of_stored_cases_is_what_nccl_ran_on_gpus() -> None:
    found = stored_exchanges()
    assert len(found) >= 7
    assert {case for case, (told, ran) in found.items() if told != ran} == set()


def test_figures_of_before_collectives_hold_what_they_tell() -> None:
    judgement = judge_step(SHARDED, STORED)
    assert judgement.verdict == "pass"
    assert not [check for check in judgement.checks if check.metric.startswith("collective")]
    assert "exchanges" not in codec.plain(STORED)


def test_parts_that_make_up_the_same_peak_are_no_change() -> None:
    other = now(memory={"weights": 2**31, "activations": 2**30})
    assert judge_step(other, STORED).verdict == "pass"


def test_without_a_stored_step_the_case_is_new_with_its_figures() -> None:
    judgement = judge_step(STORED, None)
    assert judgement.verdict == "new"
    assert {check.metric: check.value for check in judgement.checks}[PEAK] == 3 * 2**30


def test_with_other_versions_it_is_news_and_nothing_regresses(golden: Golden) -> None:
    other = now(operators={"aten::_to_copy": 58}, memory={"activations": 2**31 + 2**29}, versions={"torch": "2.14.0"})
    judgement = judge_step(other, STORED)
    assert judgement.verdict == "changed"
    golden(judgement.reason)
    assert {check.verdict for check in judgement.checks} == {None}


def test_the_same_step_with_other_versions_passes(golden: Golden) -> None:
    judgement = judge_step(now(versions={"torch": "2.14.0"}), STORED)
    assert judgement.verdict == "pass"
    golden(judgement.reason)


def result(step: StaticStep) -> CaseResult:
    judgement = judge_step(step, STORED)
    return CaseResult(
        id="a",
        digest="d",
        nodeid="n",
        machine="m",
        verdict=judgement.verdict,
        reason=judgement.reason,
        checks=judgement.checks,
        differences=STORED.other_versions(step),
    )


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("operators", [1], "expected an object"),
        ("operators", {"aten::mm": -1}, "expected a whole number"),
        ("flops", {"aten::mm": 1.5}, "expected a whole number"),
        ("memory", {"weights": True}, "expected a whole number"),
        ("sum", "0", "were edited"),
        ("versions", {"torch": "9"}, "were edited"),
    ],
)
def test_what_makes_no_sense_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        codec.read(StaticStep, {**codec.plain(STORED), field: value})


def test_a_missing_or_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match="has no 'operators'"):
        codec.read(StaticStep, {})
    with pytest.raises(ValueError, match="expected an object"):
        codec.read(StaticStep, [])


def stored_files() -> list[Path]:
    return sorted(path for path in BASELINES.glob("*/*/*.json"))


def test_every_stored_baseline_is_written_as_it_was_read() -> None:
    for path in stored_files():
        text = path.read_text(encoding="utf-8")
        assert text_of(parse(Baseline, text, str(path))) == text


def test_a_section_is_all_that_recording_adds_to_a_baseline() -> None:
    path = stored_files()[0]
    text = path.read_text(encoding="utf-8")
    old = replace(parse(Baseline, text, str(path)), static=None)
    kept = replace(old, static=StoredStep(step=STORED, recorded_at="2026-01-01T00:00:00Z", reason="why"))
    written = text_of(kept)
    assert parse(Baseline, written, "it") == kept
    document = json.loads(written)
    section = document.pop("static")
    assert document == json.loads(text_of(old))
    assert section["reason"] == "why"
    assert '   "aten::_to_copy": 26,\n' in written  # one line an operator


def alone() -> StepBaseline:
    static = StoredStep(step=STORED, recorded_at="2026-01-01T00:00:00Z")
    return StepBaseline(
        id=SPEC.id, digest=SPEC.digest, spec=SPEC.to_dict(), recorded_by="test_a.py::test_a", static=static
    )


def test_the_file_of_a_case_that_nobody_launched_is_read_as_it_was_written() -> None:
    assert parse(StepBaseline, text_of(alone()), "it") == alone()


def test_an_edited_section_is_refused_in_one_line_by_its_file(golden: Golden) -> None:
    document = json.loads(text_of(alone()))
    document["static"]["operators"]["aten::mm"] = 44
    with pytest.raises(BaselineError) as error:
        parse(StepBaseline, json.dumps(document), "it")
    golden(error)
    assert "\n" not in str(error.value)
