"""Two sides in turns on the same hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf.judge.pairs import Bounds
from pytest_llmperf.run.findings import Concluded, DidNotTrainError
from tests import fakes
from tests.engine.conftest import SPEC, Engine
from tests.golden import Golden

LARGER = replace(SPEC, micro_batch_size=2)
BOTH = f"{LARGER.id}-over-{SPEC.id}"


def compared(engine: Engine, **at_least: float) -> Concluded:
    bounds = {name: Bounds(at_least=bound, of=name) for name, bound in at_least.items()}
    return engine.run().compare(SPEC, LARGER, bounds)


@pytest.mark.parametrize("bounds", [{"throughput": 1.2}, {}])
def test_a_gain_that_holds(engine: Engine, bounds: dict[str, Any]) -> None:
    engine.fake(by={"mbs2": {"step_seconds": 0.05}})
    concluded = compared(engine, **bounds)
    assert (concluded.fails, concluded.result.id) == (False, BOTH)
    assert "throughput 4x (" in concluded.result.reason + " ".join(concluded.result.notes)
    assert engine.launches == [SPEC.id, LARGER.id]


def test_without_a_bound_nothing_is_held_and_the_reason_says_so(engine: Engine, golden: Golden) -> None:
    golden(compared(engine).result.reason)


def test_one_that_does_not_fails_and_takes_turns(engine: Engine) -> None:
    concluded = compared(engine, throughput=30.0)
    assert (concluded.result.verdict, concluded.is_acceptable) == ("regressed", False)
    assert "at least 30x" in concluded.result.reason
    assert engine.launches == [SPEC.id, LARGER.id, LARGER.id, SPEC.id]


@pytest.mark.parametrize("spec", [SPEC, LARGER])
def test_the_side_that_failed_is_named(engine: Engine, spec: Any) -> None:
    engine.fake(by={f"mbs{spec.micro_batch_size}": {"fail": "error"}})
    with pytest.raises(DidNotTrainError):
        compared(engine)
    (result,) = engine.findings.results
    assert (result.id, result.verdict) == (BOTH, "invalid")
    assert result.reason.startswith(f"{spec.id}: launch failed (error)")


@pytest.mark.parametrize("fast", [SPEC, LARGER])
def test_a_side_beyond_its_chip_is_invalid(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fast: Any, golden: Golden
) -> None:
    monkeypatch.setattr(fakes, "ENVIRONMENT", replace(fakes.ENVIRONMENT, gpu="NVIDIA H200"))
    assert compared(engine).result.verdict == "pass"
    engine.fake(by={f"mbs{fast.micro_batch_size}": {"step_seconds": 1e-9}})
    result = compared(engine).result
    assert result.verdict == "invalid"
    assert result.reason.startswith(f"{fast.id}: mfu ")
    golden(result.reason)


def test_both_sides_launches_are_kept(engine: Engine) -> None:
    result = compared(engine).result
    sides = (result.launches_before, result.launches)
    assert [[launch.spec_id for launch in side] for side in sides] == [[SPEC.id], [LARGER.id]]


def test_what_one_environment_does_otherwise_is_told_and_a_failure_says_under_which(
    engine: Engine, golden: Golden
) -> None:
    dropout = {"setup": {"samples": "by index", "dropout": {"LlamaAttention.attention_dropout": 0.3}}}
    plain: dict[str, Any] = {"setup": {"samples": "by index", "dropout": {}}}
    engine.fake(evidence=plain, by={"old-python": {"evidence": dropout, "loss": 6.5}})
    concluded = engine.check(against="old-python")
    assert concluded.held_against == "turns with old-python"
    golden(concluded.result.changed)
    engine.fake(by={"old-python": {"fail": "error"}})
    with pytest.raises(DidNotTrainError) as raised:
        engine.check(against="old-python")
    golden(raised)
