"""Cases judged without a launch: where figures are kept, what they decide, and what replaces them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.run import static_check
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError
from pytest_llmperf.run.static_check import record_static
from tests.engine.conftest import EAGER, SPEC, Engine
from tests.fakes import STEP, write_static
from tests.golden import Golden

GPUS = Machine(gpus=(Gpu(index=0, uuid="a", name="Fake GPU", memory_bytes=2**35),), cpu_name="Fake CPU", cores=8)


def moved(engine: Engine, **more: Any) -> None:
    """What fake tensors tell from now on."""
    write_static(engine.path, **more)


@pytest.fixture
def recorded(engine: Engine) -> Engine:
    """A baseline of launches, and static figures in it."""
    engine.record()
    assert engine.static(update="new").check(SPEC).result.updated
    return engine


def section(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["static"]
    return values


def test_nothing_is_launched_and_no_hardware_is_asked_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("a static run asks no driver")

    monkeypatch.setattr("pytest_llmperf.launch.machine.find_machine", asked)
    assert engine.static().check(replace(SPEC, gpus=32)).result.verdict == "new"
    assert engine.launches == []


def test_a_case_without_stored_figures_is_new_and_fails(engine: Engine) -> None:
    engine.record()
    concluded = engine.static().check(SPEC)
    assert (concluded.result.verdict, concluded.fails) == ("new", True)


def test_figures_go_into_the_baselines_of_every_machine_kind_that_has_the_case(engine: Engine) -> None:
    engine.record()
    engine.on(GPUS)
    engine.check(SPEC, update="all", gpus=1)
    assert len(engine.baselines) == 2
    before = [json.loads(path.read_text()) for path in engine.baselines]
    concluded = engine.static(update="new").check(SPEC)
    assert not concluded.fails
    after = [json.loads(path.read_text()) for path in engine.baselines]
    assert [{**old, "static": new["static"]} for old, new in zip(before, after, strict=True)] == after
    assert engine.static().check(SPEC).result.verdict == "pass"


def test_a_case_that_nobody_launched_has_a_file_of_its_own(engine: Engine) -> None:
    engine.static(update="new").check(SPEC)
    (path,) = engine.baselines
    assert path == engine.path / "baselines" / "static" / f"{SPEC.id}.json"
    assert engine.static().check(SPEC).result.verdict == "pass"
    # It is no baseline of launches.
    engine.fake()
    assert engine.check(SPEC).result.verdict == "new"


def test_a_machine_kind_that_is_named_is_the_only_one(recorded: Engine) -> None:
    assert recorded.static(machine="another").check(SPEC).result.verdict == "new"


def test_a_copy_more_fails_and_says_which(recorded: Engine, golden: Golden) -> None:
    moved(recorded, operators={"aten::_to_copy": 58})
    concluded = recorded.static().check(SPEC)
    assert (concluded.result.verdict, concluded.fails) == ("regressed", True)
    golden(concluded.result.reason)


def test_what_changed_passes_unless_the_run_is_strict(recorded: Engine) -> None:
    moved(recorded, operators={"aten::mm": 40})
    assert not recorded.static().check(SPEC).fails
    assert recorded.static(strict=True).check(SPEC).fails


def test_what_moved_is_recorded_with_a_reason_alone(recorded: Engine, golden: Golden) -> None:
    moved(recorded, operators={"aten::mm": 40})
    refused = recorded.static(update="all").check(SPEC)
    golden(refused.refused)
    accepted = recorded.static(update="all", reason="one product of three").check(SPEC)
    assert accepted.result.updated
    golden(section(recorded.baselines[0])["reason"])
    assert recorded.static().check(SPEC).result.verdict == "pass"


def test_what_is_the_same_is_not_written_again(recorded: Engine) -> None:
    (path,) = recorded.baselines
    before = path.read_bytes()
    assert not recorded.static(update="all").check(SPEC).result.updated
    assert path.read_bytes() == before


def test_new_leaves_what_is_stored(recorded: Engine) -> None:
    moved(recorded, operators={"aten::mm": 40})
    assert not recorded.static(update="new", reason="no").check(SPEC).result.updated


def test_with_other_versions_nothing_regresses(recorded: Engine) -> None:
    moved(recorded, operators={"aten::_to_copy": 58}, versions={"torch": "2.14.0"})
    result = recorded.static().check(SPEC).result
    assert (result.verdict, result.differences) == ("changed", ("torch: 2.13.0 -> 2.14.0",))


def test_what_never_could_be_told_is_skipped_with_its_reason(engine: Engine, golden: Golden) -> None:
    moved(engine, error="fp8 rowwise is not modelled")
    with pytest.raises(CannotRunError) as raised:
        engine.static().check(SPEC)
    golden(raised)
    (skipped,) = engine.findings.skipped
    assert not skipped.lost
    assert engine.findings.results == []


def test_what_could_be_told_before_and_cannot_be_now_is_invalid(recorded: Engine) -> None:
    moved(recorded, error="KeyError: 'rope_type'")
    concluded = recorded.static(update="all", reason="no").check(SPEC)
    assert (concluded.result.verdict, concluded.fails) == ("invalid", True)
    assert "KeyError: 'rope_type'" in concluded.result.reason


def test_a_package_that_is_gone_skips_what_was_judged_before(
    recorded: Engine, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    moved(recorded, error="Liger is not installed")
    monkeypatch.setattr(static_check, "why_none", lambda _spec: "Liger is not installed")
    with pytest.raises(CannotRunError) as raised:
        recorded.static().check(SPEC)
    golden(raised)
    assert recorded.findings.skipped[0].lost


def test_what_takes_launches_is_skipped_and_says_so(engine: Engine) -> None:
    static = engine.static()
    for ask in (
        lambda: static.compare(SPEC, EAGER, {}),
        lambda: static.max_micro_batch(SPEC),
        lambda: static.measure(SPEC),
    ):
        with pytest.raises(CannotRunError, match="--perf-static"):
            ask()
    assert len(engine.findings.skipped) == 3


def test_a_wider_case_than_the_run_may_use_is_skipped(engine: Engine, golden: Golden) -> None:
    with pytest.raises(CannotRunError) as raised:
        engine.static(gpus=1).check(replace(SPEC, gpus=2))
    golden(raised)


def test_an_edited_section_is_refused_by_its_file(recorded: Engine, golden: Golden) -> None:
    (path,) = recorded.baselines
    document = json.loads(path.read_text())
    document["static"]["operators"]["aten::mm"] = 9
    path.write_text(json.dumps(document))
    with pytest.raises(CaseFailedError) as error:
        recorded.static().check(SPEC)
    golden(error)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_launches_that_are_recorded_leave_the_static_figures(recorded: Engine) -> None:
    kept = section(recorded.baselines[0])
    assert recorded.check(SPEC, update="all").result.updated
    assert section(recorded.baselines[0]) == kept


def test_a_run_that_recorded_on_a_gpu_records_the_static_figures_at_its_end(engine: Engine) -> None:
    engine.on(GPUS)
    engine.fake()
    result = engine.check(SPEC, gpus=1, update="all").result
    assert record_static(engine.caller(gpus=1, update="all"), [result]) == []
    assert section(engine.baselines[0])["operators"] == STEP["operators"]


@pytest.mark.parametrize(("version", "is_kept"), [("2.13.0", False), ("2.11.0", True)])
def test_a_run_that_recorded_leaves_figures_of_other_versions_to_whoever_holds_them(
    engine: Engine, version: str, *, is_kept: bool
) -> None:
    engine.on(GPUS)
    engine.fake()
    result = engine.check(SPEC, gpus=1, update="all").result
    assert record_static(engine.caller(gpus=1, update="all", reason="why"), [result]) == []
    before = section(engine.baselines[0])
    moved(engine, operators={"aten::mm": 7}, versions={**STEP["versions"], "torch": version})
    assert record_static(engine.caller(gpus=1, update="all", reason="why"), [result]) == []
    assert (section(engine.baselines[0]) == before) is is_kept


def test_the_file_of_its_own_then_names_the_test_that_recorded_the_launches(engine: Engine) -> None:
    engine.on(GPUS)
    engine.fake()
    engine.static(update="new").check(SPEC)
    result = engine.check(SPEC, gpus=1, update="all").result
    moved(engine, operators={"aten::mm": 40})
    assert record_static(engine.caller(gpus=1, update="all", reason="r"), [result]) == []
    assert {json.loads(path.read_text())["recorded_by"] for path in engine.baselines} == {result.nodeid}


def test_what_cannot_be_told_is_a_note_of_a_run_that_recorded(engine: Engine, golden: Golden) -> None:
    engine.on(GPUS)
    engine.fake()
    moved(engine, error="optimizer adafactor is not modelled")
    result = engine.check(SPEC, gpus=1, update="all").result
    notes = record_static(engine.caller(gpus=1, update="all"), [result])
    assert len(notes) == 1
    golden(notes[0])


def test_a_cpus_recording_tells_of_no_gpus_step(engine: Engine) -> None:
    engine.fake()
    result = engine.check(SPEC, update="all").result
    assert record_static(engine.caller(gpus=0, update="all"), [result]) == []
    assert "static" not in json.loads(engine.baselines[0].read_text())
