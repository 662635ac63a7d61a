"""Cases beside their plain form: when that is asked for, and what a difference does to the case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.learning import PARITY_SEEDS, TrainingErrors
from pytest_llmperf.run import case
from pytest_llmperf.run.case import CaseTerms
from pytest_llmperf.run.findings import CannotRunError, DidNotTrainError, Width
from pytest_llmperf.settings.registry import small
from tests.engine.conftest import EAGER, SPEC, Engine
from tests.fakes import FakeLauncher
from tests.golden import Golden
from tests.unit.judge.test_training_parity import PLAIN, training


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a launch beside the truth yields, and what was asked for."""
    found: dict[str, Any] = {"beside": [training()], "orders": []}

    def errors(
        _self: FakeLauncher, request: LaunchRequest, _watch: Callable[[Progress], None]
    ) -> list[TrainingErrors] | Failure:
        assert request.parity is not None
        found["orders"].append((request.spec.id, bool(request.parity.truth)))
        return found["beside"] if request.parity.truth else PLAIN

    monkeypatch.setattr(FakeLauncher, "training_errors", errors, raising=False)
    return found


WRONG = [training(seed, gradients={"a": 0.5}) for seed in (1, 2, 3)]


def test_the_plain_form_is_launched_once_a_run(engine: Engine, told: dict[str, Any]) -> None:
    run = engine.run()
    assert run.same_training(SPEC).result.verdict == "pass"
    assert run.same_training(EAGER, SPEC).result.verdict == "pass"
    assert [truth for _, truth in told["orders"]] == [False, True, True]


def test_a_difference_is_invalid_and_fails(engine: Engine, told: dict[str, Any]) -> None:
    told["beside"] = WRONG
    concluded = engine.run().same_training(SPEC)
    assert (concluded.result.verdict, concluded.fails) == ("invalid", True)
    assert concluded.result.reason.startswith("gradient of a ")


@pytest.mark.parametrize("how", ["option", "marker"])
def test_a_case_that_differs_is_not_measured(engine: Engine, told: dict[str, Any], how: str) -> None:
    told["beside"] = WRONG
    engine.fake()
    run = engine.run(parity=True) if how == "option" else engine.run(CaseTerms(parity=True))
    concluded = run.check(SPEC)
    assert concluded.fails
    assert concluded.result.id.endswith("-as-plain")
    assert engine.launches == []


def test_a_case_that_does_not_goes_on_to_its_baseline(engine: Engine, told: dict[str, Any]) -> None:
    engine.fake()
    assert engine.check(SPEC, parity=True).result.verdict == "new"
    assert [result.verdict for result in engine.findings.results] == ["pass", "new"]


def test_a_launch_that_fails_is_told_by_its_spec(engine: Engine, told: dict[str, Any]) -> None:
    told["beside"] = Failure(kind="error", message="rank 0: broke", tail=(), folder="here")
    with pytest.raises(DidNotTrainError, match="rank 0: broke"):
        engine.run().same_training(SPEC)


def test_a_run_that_launches_nothing_skips_it(engine: Engine, told: dict[str, Any], golden: Golden) -> None:
    with pytest.raises(CannotRunError) as raised:
        engine.static().same_training(SPEC)
    golden(raised)
    assert engine.run(dry_run=True).same_training(SPEC).result.verdict == "planned"
    assert told["orders"] == []


def test_a_case_that_differs_has_its_baseline_in_use(engine: Engine, told: dict[str, Any]) -> None:
    told["beside"] = WRONG
    assert engine.check(SPEC, parity=True).fails
    assert SPEC.digest in engine.findings.digests


def test_the_width_is_that_of_the_case_and_not_of_the_small_one(engine: Engine, told: dict[str, Any]) -> None:
    engine.fake()
    wide = replace(SPEC, gpus=4)
    assert engine.check(wide, parity=True, width=Width(gpus=4)).result.id == wide.id
    assert [spec for spec, is_beside in told["orders"] if is_beside] == [small(wide).id]
    with pytest.raises(CannotRunError, match="asks for 4 GPU"):
        engine.check(wide, parity=True, width=Width(gpus=2))


def test_a_case_that_a_missing_package_skips_is_told_by_its_own_name_as_lost(
    engine: Engine, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.fake()
    engine.check(SPEC, update="new")
    for name in ("missing_package", "why_skip"):
        monkeypatch.setattr(case, name, lambda spec, **_: f"{spec.id}: needs it")
    with pytest.raises(CannotRunError, match=f"^{SPEC.id}: needs it"):
        engine.check(SPEC, parity=True)
    assert [each.lost for each in engine.findings.skipped] == [True]


def test_the_last_seeds_leave_room_for_those_that_follow() -> None:
    last = replace(SPEC, seed=2**32 - 1)
    assert small(last).seed + PARITY_SEEDS < 2**32
    assert small(SPEC).seed == SPEC.seed
