"""From launches to a conclusion, and to baselines."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf.judge.acceptance import accept
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.store import BaselineChangedError, parse
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.run.case import CaseTerms
from pytest_llmperf.run.findings import CaseFailedError, DidNotTrainError
from pytest_llmperf.settings.spec import ScriptSpec
from tests.engine.conftest import EAGER, SPEC, Engine
from tests.golden import Golden

_APART = {"evidence": {"other_ranks": {"torch_compile": {"1": "False"}}}}


def test_a_slowdown_beyond_the_tolerance_fails(engine: Engine) -> None:
    engine.record(step_seconds=0.1)
    engine.fake(step_seconds=0.12)
    assert not engine.check().fails
    engine.fake(step_seconds=0.9)
    concluded = engine.check()
    assert (concluded.fails, concluded.result.verdict) == (True, "regressed")
    assert concluded.result.reason.startswith("tokens_per_second_per_gpu ")
    assert concluded.is_acceptable


def test_memory_above_its_ceiling_fails(engine: Engine) -> None:
    engine.record(reserved_bytes=1000 * 2**20)
    engine.fake(reserved_bytes=1011 * 2**20)
    concluded = engine.check(memory_tolerance=0.01)
    assert concluded.result.reason.startswith("peak_reserved_bytes ")


def test_an_improvement_passes_and_fails_only_a_strict_run(engine: Engine) -> None:
    engine.record(step_seconds=1.0)
    engine.fake(step_seconds=0.1)
    assert [engine.check(strict=strict).fails for strict in (False, True)] == [False, True]


def test_nan_is_invalid_and_never_recorded(engine: Engine) -> None:
    engine.fake(loss=math.nan)
    concluded = engine.check(update="all", reason="because")
    assert (concluded.result.verdict, concluded.fails) == ("invalid", True)
    assert "never recorded" in concluded.refused
    assert engine.baselines == []


def test_an_optimisation_that_was_not_active_is_invalid(engine: Engine) -> None:
    engine.record(SPEC, EAGER)
    engine.fake(evidence={"attention": "eager"})
    assert [engine.check(spec).result.verdict for spec in (SPEC, EAGER)] == ["invalid", "pass"]


def test_a_step_time_that_is_none_is_invalid_and_costs_no_other_case_its_result(engine: Engine) -> None:
    engine.fake(by={"eager": {"step_seconds": 0.0}})
    checks = engine.run(update="new")
    assert [checks.check(spec).result.verdict for spec in (EAGER, SPEC)] == ["invalid", "new"]


def test_what_a_fault_did_is_a_note_and_not_offered_to_be_accepted(engine: Engine) -> None:
    engine.record()
    engine.fake(reserved_bytes=2**31, evidence={"injected": "hold=1073741824"})
    concluded = engine.check()
    assert (concluded.fails, concluded.is_acceptable) == (True, False)
    assert "measured under LLMPERF_INJECT=hold=1073741824" in concluded.result.notes


@pytest.mark.parametrize(("name", "did"), [("graph_breaks", "broke the graph"), ("recompilations", "compiled anew")])
def test_what_the_compiler_did_is_a_note_of_a_new_case_and_a_change_of_others(
    engine: Engine, name: str, did: str
) -> None:
    compiled = replace(SPEC, torch_compile=True)
    engine.fake(evidence={name: 2})
    assert f"torch_compile {did} 2 time(s)" in engine.check(compiled).result.notes
    engine.record(compiled, evidence={name: 2})
    for times, changed in ((2, ()), (3, (f"{name}: 2 -> 3",))):
        engine.fake(evidence={name: times})
        result = engine.check(compiled).result
        assert (result.verdict, result.changed) == ("pass", changed)


@pytest.mark.parametrize(("recorded", "told"), [(({}, _APART), False), ((_APART, {}), True)])
def test_where_ranks_of_a_script_disagree_is_told_unless_they_did_when_it_was_last_recorded(
    engine: Engine, recorded: tuple[Any, ...], told: bool
) -> None:
    script = ScriptSpec(command="python train.py", steps=8, warmup_steps=2)
    engine.fake(sequence=[*recorded, _APART])
    assert engine.run(update="all", reason="start").check(script).result.updated
    assert any("rank 1 has" in line for line in engine.run().check(script).result.notes) is told


def test_a_micro_batch_of_several_has_its_own_seconds(engine: Engine) -> None:
    result = engine.check(replace(SPEC, gradient_accumulation_steps=4)).result
    seconds = {check.metric: check.value for check in result.checks}
    assert seconds["micro_batch_seconds"] == pytest.approx(seconds["step_seconds"] / 4)


@pytest.mark.parametrize(
    ("launches", "verdict"),
    [
        ([{"fail": "oom"}], "pass"),
        ([{"fail": "oom", "foreign_processes": ["pid 7"]}, {"fail": "oom"}], "pass"),
        ([{"fail": "oom", "foreign_processes": ["pid 7"]}], None),
        ([{"fail": "oom", "foreign_processes": ["pid 7"]}, {}], "invalid"),
        ([{}], "invalid"),
    ],
)
def test_a_case_that_must_run_out_of_memory_does_so_alone(
    engine: Engine, launches: list[dict[str, Any]], verdict: str | None
) -> None:
    gpu = Gpu(index=0, uuid="GPU-0", name="Fake GPU", memory_bytes=64 * 2**30)
    engine.on(Machine(gpus=(gpu,), cpu_name="Fake CPU", cores=8))
    engine.fake(sequence=launches)
    checks = engine.run(CaseTerms(oom_below_gib=65), gpus=1)
    if verdict is None:
        with pytest.raises(DidNotTrainError):
            checks.check(SPEC)
    else:
        assert checks.check(SPEC).result.verdict == verdict
    assert len(engine.launches) == 1 + ("foreign_processes" in launches[0])


@pytest.mark.parametrize("kind", ["oom", "error", "killed", "timeout", "never-started"])
def test_a_failed_launch_fails_and_names_its_folder(engine: Engine, kind: str, golden: Golden) -> None:
    engine.fake(fail=kind)
    with pytest.raises(DidNotTrainError) as told:
        engine.check()
    lines = str(told.value).splitlines()
    golden(lines[0])
    assert "last line" in lines[1]
    assert lines[2].startswith(f"logs: {engine.path}/.llmperf/")
    assert told.value.may_train_again
    golden([(one.verdict, one.reason) for one in engine.findings.results])


def test_a_refusal_has_no_logs_and_nothing_to_run_again(engine: Engine, golden: Golden) -> None:
    engine.fake(fail="refused")
    with pytest.raises(DidNotTrainError) as told:
        engine.check()
    assert not told.value.may_train_again
    golden(str(told.value))


class TestUpdating:
    def test_new_records_only_what_has_no_baseline(self, engine: Engine) -> None:
        engine.record(step_seconds=0.1)
        (kept,) = engine.baselines
        text = kept.read_text()
        engine.fake(step_seconds=0.11)
        checks = engine.run(update="new")
        assert [bool(checks.check(spec).result.updated) for spec in (SPEC, EAGER)] == [False, True]
        assert kept.read_text() == text

    def test_a_worse_figure_needs_a_reason(self, engine: Engine, golden: Golden) -> None:
        engine.record(step_seconds=0.1)
        (path,) = engine.baselines
        before = path.read_text()
        engine.fake(step_seconds=10.0)
        refused = engine.check(update="all")
        assert refused.fails
        assert "--perf-reason" in refused.refused
        assert path.read_text() == before
        accepted = engine.check(update="all", reason="the new optimizer is worth it")
        assert (accepted.fails, accepted.refused) == (False, "")
        assert "anchor" in accepted.result.updated
        golden.lines(path.read_text(), "the new optimizer")
        assert engine.check().result.verdict == "pass"

    @pytest.mark.parametrize(
        ("text", "said"), [("", "empty"), ('{"schema": 1, "id"', ""), ('{"schema": 99}', "newer"), ("[]", "")]
    )
    @pytest.mark.parametrize("settings", [{}, {"update": "all", "reason": "why"}])
    def test_a_broken_file_is_named_before_anything_is_launched_and_kept(
        self, engine: Engine, text: str, said: str, settings: dict[str, Any]
    ) -> None:
        engine.record()
        (broken,) = engine.baselines
        broken.write_text(text)
        with pytest.raises(CaseFailedError, match=broken.name) as told:
            engine.check(**settings)
        assert said in str(told.value)
        assert (broken.read_text(), engine.launches) == (text, [])

    def test_a_figure_that_is_none_is_named(self, engine: Engine, golden: Golden) -> None:
        engine.record()
        (broken,) = engine.baselines
        document = json.loads(broken.read_text())
        document["launches"][0]["canary"] = {"matmul_flops": None}
        broken.write_text(json.dumps(document))
        with pytest.raises(CaseFailedError) as raised:
            engine.check()
        golden(raised)

    def test_a_file_of_another_digest_is_refused(self, engine: Engine) -> None:
        engine.record(SPEC, EAGER)
        first, second = engine.baselines
        first.write_text(second.read_text())
        with pytest.raises(CaseFailedError, match=first.name):
            engine.check(EAGER)

    def test_a_baselines_folder_that_cannot_be_made_is_told_before_a_launch(self, engine: Engine) -> None:
        (engine.path / "taken").write_text("a file")
        with pytest.raises(CaseFailedError):
            engine.check(update="all", baselines=engine.path / "taken" / "here")
        assert engine.launches == []

    def test_another_runs_recording_meanwhile_is_what_a_case_is_held_against(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.record(step_seconds=0.1)
        (path,) = engine.baselines
        old = path.read_text()
        engine.fake(step_seconds=1.0)
        engine.check(update="all", reason="another run's")
        theirs = path.read_text()
        path.write_text(old)
        engine.fake(step_seconds=0.1)
        told: list[str] = []

        def late(found: Any, **values: Any) -> Any:
            if not told:
                told.append(values["result"].verdict)
                path.write_text(theirs)
                raise BaselineChangedError(SPEC.id, parse(Baseline, theirs, path.name))
            return accept(found, **values)

        monkeypatch.setattr("pytest_llmperf.run.conclusion.accept", late)
        concluded = engine.check(update="all", reason="mine")
        assert (told, concluded.result.verdict) == (["pass"], "improved")
        assert concluded.result.updated
        assert "another run's" in path.read_text()
