"""What a result points to: the rank that all wait for, the step's parts, and what fits them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_llmperf.judge.verdict import GROWTH
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.records.trace import Trace, TraceRow, merged
from pytest_llmperf.run.diagnosis import beside_verdict, diagnosed
from pytest_llmperf.run.findings import DidNotTrainError
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.engine.conftest import SPEC, Engine
from tests.fakes import Fake, launch_of
from tests.golden import Golden

RESULT = CaseResult(id="case", digest="0", nodeid="", machine="h200", verdict="regressed", reason="slower")
SLOW = "rank 1 (node, GPU 1) holds the others up: it works 40.0 % longer on a step than the rank in the middle"


def rank(*, idle: float = 0.0, exposed: float = 0.0) -> Trace:
    rows = (TraceRow("collective", "ncclDevKernel", 5.0, 0.02 + exposed), TraceRow("kernel", "nvjet", 100.0, 0.1))
    return Trace(
        rows=rows,
        steps=3,
        step_seconds=0.12 + idle + exposed,
        busy_seconds=0.12 + exposed,
        exposed_seconds=0.02 + exposed,
    )


def test_a_rank_that_all_wait_for_is_told_before_the_means_of_all(golden: Golden) -> None:
    before, after = merged([rank(), rank()]), merged([rank(exposed=0.04), rank(idle=0.04)])
    said = diagnosed(RESULT, before, after, [SLOW]).diagnosis
    golden(said)
    # One rank waits in an exchange for the other, whose device waits for its host.
    assert "communication +20.0 ms" in said
    assert said.endswith("unexplained 0.00 ms")


GPUS = Machine(gpus=(Gpu(index=0, uuid="a", name="Fake GPU", memory_bytes=2**35),), cpu_name="Fake CPU", cores=8)


def test_what_no_count_says_is_noted_of_a_first_recording_and_of_a_pass_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    engine.on(GPUS)

    def noted(*ranks: Trace, **options: str) -> list[str]:
        monkeypatch.setattr("tests.fakes.trace_of", lambda _: merged(ranks))
        engine.fake(trace={"kernel": {"nvjet": 1}})
        notes = engine.check(SPEC, gpus=1, **options).result.notes
        return [note for note in notes if note.startswith(("the others wait", "overlap lost"))]

    late, hides = [rank(exposed=0.04), rank(idle=0.04)], replace(rank(), exposed_seconds=0.0)
    golden(noted(*late, update="all"))
    assert noted(*late) == []
    noted(hides, hides, update="all", reason="r")
    assert noted(hides, hides) == []
    golden(noted(rank(), rank()))


def test_it_is_told_without_traces_too() -> None:
    assert diagnosed(RESULT, None, Trace(none="lost"), [SLOW]).diagnosis == SLOW
    assert not diagnosed(RESULT, None, None).diagnosis


def test_what_fits_a_device_that_waits_for_its_host_is_its_environment(golden: Golden) -> None:
    result = replace(RESULT, differences=("accelerate: 1 -> 2", "CUDA_LAUNCH_BLOCKING: none -> 1"))
    told = diagnosed(result, rank(), rank(idle=0.05))
    assert told.differences == ("CUDA_LAUNCH_BLOCKING: none -> 1", "accelerate: 1 -> 2")
    golden(told.diagnosis)


def test_a_leak_of_a_script_is_told_with_its_variable_and_its_file_once(golden: Golden) -> None:
    seen = [Fake(evidence={"setup": {"sources": {"train.py": digest}}}) for digest in ("aaaa", "bbbb")]
    stored, now = (launch_of(ScriptSpec(command="python train.py"), each) for each in seen)
    told = "each step leaves 1 Tensor in 'history' of train.py"
    leak = METRICS[GROWTH].check(2.0**21, None, change=None, limit=2.0**16, verdict="regressed", detail=told)
    files = ("train.py: aaaa -> bbbb", "CUDA_LAUNCH_BLOCKING: none -> 1")
    result = replace(RESULT, launches=(now,), checks=(leak,), reason=leak.metric, differences=files)
    explained = diagnosed(beside_verdict(result, stored, rank()), rank(), rank(idle=0.05))
    golden([explained.reason, explained.diagnosis])


def test_a_launch_that_fails_tells_what_is_not_as_it_was(engine: Engine, golden: Golden) -> None:
    engine.record()
    engine.fake(fail="error", versions={"torch": "2.1"})
    with pytest.raises(DidNotTrainError) as raised:
        engine.check()
    golden(raised)
    assert engine.findings.results[-1].differences == ("torch: 2.0 -> 2.1",)


def test_a_loss_of_time_with_the_same_work_is_not_blamed_on_what_cannot_cause_it(engine: Engine) -> None:
    engine.record(trace={"kernel": {"gemm": 200}}, versions={"python": "3.11.7"})
    engine.fake(trace={"kernel": {"gemm": 200}}, versions={"python": "3.11.8"}, step_seconds=1.0)
    result = engine.check().result
    assert result.differences == ("python: 3.11.7 -> 3.11.8",)
    assert "different:" not in result.diagnosis


@pytest.mark.parametrize("both", [False, True])
def test_what_a_library_printed_is_a_note_until_it_is_stored(engine: Engine, both: bool) -> None:
    said = {"remarks": ["falling back"]}
    engine.record(evidence=said if both else {})
    engine.fake(evidence=said)
    result = engine.check().result
    assert (result.verdict, result.changed) == ("pass", ())
    assert ("falling back" in result.notes) is not both


def test_a_gate_that_its_spec_opened_since_the_recording_says_so(engine: Engine, golden: Golden) -> None:
    engine.on(GPUS)

    def noted(spec: TrainSpec) -> list[str]:
        return [note for note in engine.check(spec, gpus=1).result.notes if "tolerance" in note]

    engine.fake()
    assert engine.check(gpus=1, update="all", reason="start").result.updated
    assert noted(SPEC) == []
    assert noted(replace(SPEC, throughput_tolerance=0.01)) == []
    opened = replace(SPEC, throughput_tolerance=0.9)
    golden(noted(opened))


def test_a_doubled_first_loss_fails_and_is_recorded_with_a_reason_alone(engine: Engine) -> None:
    setup = {"setup": {"samples": "by index"}}
    engine.record(loss=6.0, evidence=setup)
    engine.fake(loss=12.0, evidence=setup)
    failed, refused = engine.check(), engine.check(update="all")
    assert (failed.result.verdict, failed.fails) == ("regressed", True)
    assert "first_loss 12, baseline 6" in failed.result.reason
    assert "first_loss 6 -> 12" in refused.refused
    assert engine.check(update="all", reason="summed").result.updated
    assert engine.check().result.verdict == "pass"
