"""Documents as ``--perf-json`` writes them, of runs that never were: the chapter's ladder, judged by the real judge."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pytest_llmperf.analysis import ladder
from pytest_llmperf.analysis.ladder import Rung
from pytest_llmperf.judge.baseline import Baseline, StoredStep
from pytest_llmperf.judge.exact import StoredTrace
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Spent
from pytest_llmperf.records.trace import StaticStep
from pytest_llmperf.report.results_json import RunDocument, document
from pytest_llmperf.run.history_store import HistoryStore, past_results
from pytest_llmperf.run.page_charts import Baselines
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of, trace_of
from tests.shelf import baseline_at

MACHINE = "nvidia-h200-140gib"
PHASES = {"waiting_for_hardware": 0.5, "start": 0.1, "model": 1.3, "first_step": 1.5, "steps": 10.0, "end": 1.0}
KERNELS = {"kernel": {"nvjet_gemm": 200.0, "flash_fwd_kernel": 60.0}, "wait": {"cudaStreamSynchronize": 6.0}}
MORE_KERNELS = {**KERNELS, "kernel": {**KERNELS["kernel"], "elementwise_add": 40.0}}

#: What a rung of the ladder below is slower by than its baseline, by its number; the others are as fast.
SLOWER, FASTER = {"15.6": 1.12}, {"15.7": 0.9}


def launches_at(spec: TrainSpec, rate: float, number: int = 2) -> tuple[Launch, ...]:
    """Launches at so many tokens/s per GPU, on GPUs of one host."""
    seconds = spec.sequences_per_step * spec.sequence_length / (rate * spec.gpus)
    made = launch_of(spec, Fake(step_seconds=seconds, reserved_bytes=50 * 2**30, phases=PHASES, trace=KERNELS))
    return tuple(replace(made, started_at=f"2026-02-0{day}T00:00:00Z") for day in range(1, number + 1))


def stored_at(spec: TrainSpec, rate: float) -> Baseline:
    """Its baseline of three sessions, with a trace and the parts of its memory."""
    baseline = baseline_at(spec, rate, MACHINE, gib=50)
    (one,) = baseline.launches
    launches = tuple(replace(one, started_at=f"2026-01-0{day}T00:00:00Z") for day in (1, 2, 3))
    memory = {"weights": 2 * 2**30, "optimizer": 5 * 2**30, "activations": 40 * 2**30}
    step = StaticStep(operators={"aten::mm": 1}, flops={"aten::mm": 1}, memory=memory, versions={"torch": "2.0"})
    return replace(
        baseline,
        launches=launches,
        trace=StoredTrace(trace=trace_of(KERNELS), versions={"torch": "2.0"}, counts={}),
        static=StoredStep(step=step, recorded_at="2026-01-03T00:00:00Z"),
    )


def result_of(rung: Rung, rate: float) -> CaseResult:
    """The rung, judged against a baseline of ``rate``."""
    spec = rung.spec
    times = {**SLOWER, **FASTER}.get(rung.number, 1.0)
    launches = launches_at(spec, rate / times)
    if rung.number in SLOWER:
        launches = tuple(replace(one, trace=trace_of(MORE_KERNELS)) for one in launches)
    judgement = judge(launches, stored_at(spec, rate), Policy.for_gpu())
    return CaseResult(
        id=spec.id,
        digest=spec.digest,
        nodeid=f"perf_tests/test_ladder.py::test_rung[{spec.id}]",
        machine=MACHINE,
        verdict=judgement.verdict,
        reason=judgement.reason,
        checks=judgement.checks,
        launches=launches,
        rung=rung.number,
        reference=rung.reference,
        differences=("torch: 2.11.0 -> 2.12.0",) if rung.number in SLOWER else (),
    )


#: Of the chapter's ladder and widths: what is measured, and stored, in these runs.
LADDER = {rung.spec.id: (rung, (rung.published_rate or 0.0) * 1.5) for rung in ladder.LLAMA if rung.published_rate}
WIDTHS = {
    rung.spec.id: (rung, 70_000.0 - 500 * rung.spec.gpus) for rung in ladder.LLAMA_WIDTHS if 1 < rung.spec.gpus <= 8
}


@cache
def _judged() -> tuple[CaseResult, ...]:
    """All of them, judged once."""
    return tuple(result_of(rung, rate) for rung, rate in {**LADDER, **WIDTHS}.values())


def ladder_run(results: Sequence[CaseResult] | None = None) -> dict[str, Any]:
    """The document of a run of the ladder and of four widths: one rung slower, one faster."""
    found = _judged() if results is None else results
    launches = sum(len(result.launches) for result in found)
    spent = Spent(launches=launches, phases={name: launches * seconds for name, seconds in PHASES.items()})
    gpu = {"name": "NVIDIA H200", "memory_bytes": 150_754_820_096, "uuid": "GPU-1"}
    values = document({"kind": MACHINE, "cores": 32, "gpus": [gpu] * 8}, found, spent)
    return values | {"exit_code": 1, "rerun": ["pytest", "{test}", "--gpus", "8"]}


def night(day: int, times: float = 1.0, torch: str = "2.11") -> RunDocument:
    """Of the ladder on that day of March, all of whose steps took so many times as long."""
    values: Any = json.loads(json.dumps(ladder_run()))
    for result in values["results"]:
        result["launches"] = result["launches"][:1]
        for launch in result["launches"]:
            launch["started_at"] = f"2026-03-{day:02d}T00:00:00Z"
            launch["environment"]["versions"]["torch"] = torch
            for rank in launch["ranks"]:
                rank["step_seconds"] = [each * times for each in rank["step_seconds"]]
    return RunDocument(values)


def nineteen_nights(path: Path) -> Path:
    """A store of them, of which the last nine are slower, by another torch."""
    path.write_bytes(_nineteen_nights())
    return path


@cache
def _nineteen_nights() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "history.sqlite")
        for day in range(1, 20):
            slow = day > 10
            HistoryStore(path).append(past_results(night(day, 1.1 if slow else 1.0, "2.12" if slow else "2.11"), "x"))
        assert [*Path(folder).iterdir()] == [path]
        return path.read_bytes()


def stored_figures() -> Baselines:
    """The baselines that it was judged against."""
    baselines = [stored_at(rung.spec, rate) for rung, rate in {**LADDER, **WIDTHS}.values()]
    return {(MACHINE, one.digest): one for one in baselines}


def written(path: Path, values: object) -> Path:
    """``values`` in a file, whatever they are."""
    path.write_text(json.dumps(values), encoding="utf-8")
    return path
