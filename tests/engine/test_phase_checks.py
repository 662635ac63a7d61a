"""What a launch takes before its steps, held against the baseline's launches: wide, alike, and never by one launch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf.judge.policy import Policy, Reference, Rule
from pytest_llmperf.judge.verdict import phase_checks
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, phases
from pytest_llmperf.run.case import CaseTerms
from tests.engine.conftest import SPEC, Engine
from tests.fakes import Fake, launch_of
from tests.golden import Golden

COLD = {"start": 4.0, "imports": 9.0, "model": 2.0, "first_step": 0.5, "steps": 2.0, "end": 1.0}
WARM = {**COLD, "start": 0.1, "imports": 0.0, "model": 0.6}


def slow(seconds: float, phase: str = "model") -> dict[str, float]:
    return {**COLD, phase: COLD[phase] + seconds}


def test_a_model_that_takes_longer_to_build_in_two_launches_is_named(engine: Engine, golden: Golden) -> None:
    engine.record(phases=COLD)
    engine.fake(phases=slow(25.0))
    concluded = engine.check()
    assert len(engine.launches) == 2, "one alone condemns nobody"
    assert (concluded.result.verdict, concluded.fails) == ("regressed", True)
    golden(concluded.result.reason)


def test_one_that_did_so_once_passes_by_another_launch_and_says_so(engine: Engine, golden: Golden) -> None:
    engine.record(phases=COLD)
    engine.fake(sequence=[{"phases": slow(25.0)}, {"phases": COLD}])
    result = engine.check().result
    assert (result.verdict, len(result.launches)) == ("pass", 2)
    golden(result.notes)


def test_where_one_launch_alone_is_allowed_it_stays_undecided(engine: Engine, golden: Golden) -> None:
    engine.record(phases=COLD)
    engine.fake(phases=slow(25.0))
    result = engine.check(max_launches=1).result
    assert (result.verdict, len(result.launches)) == ("inconclusive", 1)
    check = result.check("model_seconds")
    assert check is not None
    golden(check.detail)


@pytest.mark.parametrize(("phase", "seconds"), [("model", 5.0), ("start", 10.0), ("imports", 15.0)])
def test_some_seconds_are_nobodys(engine: Engine, phase: str, seconds: float) -> None:
    engine.record(phases=COLD)
    engine.fake(phases=slow(seconds, phase))
    result = engine.check().result
    assert (result.verdict, len(result.launches)) == ("pass", 1)


@pytest.mark.parametrize("phase", ["start", "imports"])
def test_a_cold_file_system_costs_another_launch_and_no_alarm(engine: Engine, phase: str) -> None:
    engine.record(phases=COLD)
    engine.fake(sequence=[{"phases": slow(60.0, phase)}, {"phases": COLD}])
    result = engine.check().result
    assert (result.verdict, len(result.launches)) == ("pass", 2)


def test_a_cold_cache_of_kernels_costs_another_launch_and_no_alarm(engine: Engine) -> None:
    engine.record(first_step_seconds=1.4)
    engine.fake(sequence=[{"first_step_seconds": 15.0}, {"first_step_seconds": 1.4}])
    result = engine.check().result
    assert (result.verdict, len(result.launches)) == ("pass", 2)


def test_one_that_compiles_longer_in_each_launch_is_named(engine: Engine, golden: Golden) -> None:
    engine.record(first_step_seconds=30.0)
    engine.fake(first_step_seconds=61.0)
    result = engine.check(terms=CaseTerms(tolerances={"first_step_seconds": 1.0})).result
    assert (result.verdict, len(result.launches)) == ("regressed", 2)
    golden(result.reason)


def test_a_warm_launch_is_held_against_warm_ones_alone(engine: Engine) -> None:
    engine.record(phases=WARM, evidence={"start": "warm"})
    engine.fake(phases=slow(25.0), evidence={"start": "cold"})
    assert engine.check().result.verdict == "pass", "nothing like it is stored"
    engine.fake(phases={**WARM, "start": 90.0}, evidence={"start": "warm"})
    assert engine.check().result.verdict == "pass", "what was left of the imports is no launch's own"
    engine.fake(phases={**WARM, "model": 25.6}, evidence={"start": "warm"})
    assert engine.check().result.verdict == "regressed"


def test_a_loss_of_a_phase_is_recorded_with_a_reason_alone_and_what_was_stored_stays(engine: Engine) -> None:
    engine.record(phases=COLD)
    engine.fake(phases=slow(25.0))
    assert "model_seconds 2 s -> 27 s" in engine.check(update="all").refused
    assert engine.check(update="all", reason="a larger vocabulary").result.updated
    assert engine.check().result.verdict == "pass"
    (baseline,) = engine.baselines
    document = json.loads(baseline.read_text())
    assert [launch["phases"]["model"] for launch in document["launches"]] == [2.0, 27.0, 27.0]
    assert document["launches"][0]["phases"] == {"start": 4.0, "imports": 9.0, "model": 2.0}


def test_a_baseline_without_phases_gates_none_and_the_figures_are_told(engine: Engine) -> None:
    engine.record()
    engine.fake(phases=slow(25.0))
    result = engine.check().result
    check = result.check("model_seconds")
    assert (result.verdict, len(result.launches)) == ("pass", 1)
    assert check is not None
    assert (check.value, check.baseline, check.verdict) == (27.0, None, None)


def test_another_environment_is_held_against_its_turn(engine: Engine, golden: Golden) -> None:
    other = str(engine.path / "venv" / "python")
    engine.fake(phases=slow(25.0), by={other: {"phases": COLD}})
    result = engine.check(against=other).result
    assert (result.verdict, len(result.launches)) == ("regressed", 2)
    golden(result.reason)


def launches(*phases: dict[str, float], start: str = "cold") -> list[Launch]:
    return [launch_of(SPEC, Fake(phases=each, evidence={"start": start})) for each in phases]


def held(*phases: dict[str, float], start: str = "cold") -> Reference:
    stored = launches(*phases, start=start)
    return Reference(stored, stored, stored)


@pytest.mark.parametrize("kind", ["for_gpu", "for_cpu"])
@pytest.mark.parametrize("metric", phases())
def test_both_the_share_and_the_seconds_are_tolerated(kind: str, metric: str) -> None:
    policy: Policy = getattr(Policy, kind)()
    phase, slack, share = metric.removesuffix("_seconds"), METRICS[metric].slack, policy.tolerances[metric]
    for usual in (0.0, 0.5, 40.0):
        most = max(usual * (1 + share), usual + slack)
        for seconds, verdict in ((most, "pass"), (most + 0.01, "regressed")):
            found = phase_checks(launches(*2 * [{phase: seconds}]), held({phase: usual}), policy)
            assert [(check.metric, check.verdict) for check in found.checks] == [(metric, verdict)]
            assert not found.undecided


def test_a_run_whose_launches_began_differently_asks_for_two_that_are_alike() -> None:
    policy = replace(Policy.for_cpu(), rule=Rule(budget=4))
    mixed = [*launches(slow(25.0)), *launches(WARM, start="warm")]
    found = phase_checks(mixed, held(COLD), policy)
    verdicts = {check.metric: check.verdict for check in found.checks}
    assert (verdicts["model_seconds"], found.undecided) == ("inconclusive", True)


def test_no_phase_is_a_tolerance_that_a_user_cannot_set() -> None:
    wide: dict[str, Any] = dict.fromkeys(phases(), 0.5)
    assert Policy.for_gpu().merged(wide).tolerances["imports_seconds"] == 0.5
