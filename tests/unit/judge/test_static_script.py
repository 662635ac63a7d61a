"""The step of a script's small form: what is counted of its trace, and what repeats before it counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from pytest_llmperf.judge.static_steps import come_and_gone, judge_step
from pytest_llmperf.launch.prediction import PredictionError
from pytest_llmperf.records.trace import StaticStep, Trace, TraceRow
from pytest_llmperf.run import static_check
from pytest_llmperf.run.static_check import step_of
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.support import codec
from tests.golden import Golden

VERSIONS = {"torch": "2.13.0", "tiny": "python train.py"}
WAITS = "aten::_local_scalar_dense"
COUNTS = {
    ("operator", "aten::mm"): 4.0,
    ("operator", "aten::item"): 1.0,
    ("operator", "autograd::engine::evaluate_function: MmBackward0"): 2.0,
    ("wait", WAITS): 1.0,
    ("copy", "aten::copy_"): 0.5,
    ("operator", "c10d::allreduce_"): 2.0,
}
SPEC = ScriptSpec(command="torchrun --nproc-per-node 2 train.py", tiny="python train.py")


def step(more: dict[tuple[str, str], float] | None = None, **fields: Any) -> StaticStep:
    rows = tuple(sorted(TraceRow(*key, count, 1e-6) for key, count in {**COUNTS, **(more or {})}.items()))
    return StaticStep.of(Trace(rows=rows, steps=3, **fields), VERSIONS)


def test_callers_of_others_are_not_counted_and_a_mean_of_ranks_is_kept() -> None:
    assert step().operators == {"aten::mm": 4, WAITS: 1, "aten::copy_": 0.5, "c10d::allreduce_": 2}
    kept = step(places={"wait": {"train.py:3 loss.item()": 1.0}})
    assert codec.read(StaticStep, codec.plain(kept)) == kept == step()
    assert codec.read(StaticStep, codec.plain(kept)).places == kept.places


@pytest.mark.parametrize(
    ("more", "verdict", "reason"),
    [
        ({("wait", WAITS): 31.0}, "regressed", f"synchronisations a step +30 (+30 {WAITS})"),
        ({("copy", "aten::copy_"): 1.0}, "regressed", "copies a step +0.5 (+0.5 aten::copy_)"),
        ({("operator", "c10d::allreduce_"): 3.0}, "regressed", "collectives a step +1 (+1 c10d::allreduce_)"),
        ({("operator", "c10d::allreduce_"): 1.0}, "changed", "collectives a step -1 (-1 c10d::allreduce_)"),
        ({("operator", "aten::mm"): 5.0}, "changed", "operators a step +1 (+1 aten::mm)"),
        ({("wait", WAITS): 0.5}, "changed", f"synchronisations a step -0.5 (-0.5 {WAITS})"),
    ],
)
def test_more_waits_copies_and_collectives_regress(
    more: dict[tuple[str, str], float], verdict: str, reason: str
) -> None:
    judgement = judge_step(step(more), step())
    assert (judgement.verdict, judgement.reason) == (verdict, reason)
    assert {check.metric for check in judgement.checks}.isdisjoint({"flops_per_step", "predicted_peak_bytes"})


def test_collectives_of_a_trace_have_kinds_and_bytes() -> None:
    asked = {("exchange", "all_reduce"): 2.0, ("payload", "all_reduce"): 8192.0}
    now = step(asked)
    assert now.exchanges == {"all_reduce": (2, 8192)}
    wider = step({**asked, ("payload", "all_reduce"): 16384.0})
    assert judge_step(wider, now).verdict == "regressed"
    assert "all_reduce +8.00 KiB" in judge_step(wider, now).reason
    # Those of before, which know the operators alone.
    assert judge_step(now, step()).verdict == judge_step(step(), now).verdict == "pass"


def test_the_line_that_waits_is_named(golden: Golden) -> None:
    now = step(places={"wait": {"train.py:61 loss.item()": 30.0, "train.py:7 norm.item()": 1.0}})
    then = step(places={"wait": {"train.py:5 norm.item()": 1.0}})
    golden(come_and_gone(now, then))


OTHER = step({("operator", "aten::mm"): 5.0})


@pytest.mark.parametrize(
    ("launches", "stored", "found"),
    [
        ([step()], [step()], step()),
        ([step(), step()], [], step()),
        ([OTHER, OTHER], [step()], OTHER),
        ([OTHER, step()], [step()], True),
        ([OTHER, step()], [], False),
        ([PredictionError("no trace", is_lost=True)], [], True),
    ],
    ids=["as stored", "new", "another twice", "another once", "new and unlike", "no trace"],
)
def test_what_is_not_stored_counts_once_it_repeats(
    monkeypatch: pytest.MonkeyPatch,
    launches: list[StaticStep | PredictionError],
    stored: list[StaticStep],
    found: StaticStep | bool,
) -> None:
    coming: Iterator[StaticStep | PredictionError] = iter(launches)
    monkeypatch.setattr(static_check, "_launched", lambda *_: next(coming))
    told = step_of(cast("Any", None), SPEC, stored)
    if isinstance(told, PredictionError):
        assert told.is_lost is found
    else:
        assert told == found
    assert not list(coming)


def test_what_does_not_repeat_names_a_count(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    coming = iter([step(), OTHER])
    monkeypatch.setattr(static_check, "_launched", lambda *_: next(coming))
    told = step_of(cast("Any", None), SPEC, [])
    assert isinstance(told, PredictionError)
    golden(str(told))


def test_a_script_without_a_small_form_says_how_to_give_one(golden: Golden) -> None:
    bare = ScriptSpec(command="python train.py")
    told = step_of(cast("Any", None), bare, [])
    assert isinstance(told, PredictionError)
    assert not told.is_lost
    golden(str(told))
    lost = step_of(cast("Any", None), bare, [step()])
    assert isinstance(lost, PredictionError)
    assert lost.is_lost
