"""Baselines on a shelf for ``llmperf`` to read, and the command run on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.judge import acceptance
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.judge.store import Accepted, text_of
from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Check, Verdict
from pytest_llmperf.settings.spec import Spec, read_spec
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of

#: Arguments in; exit code, output and errors out.
Run = Callable[..., tuple[int, str, str]]


def baseline_at(spec: TrainSpec, rate: float, machine: str = "m", *, gib: int = 1, watts: float = 0.0) -> Baseline:
    """One launch of ``spec`` at ``rate`` tokens/s per GPU."""
    seconds = spec.sequences_per_step * spec.sequence_length / (rate * spec.gpus)
    fake = launch_of(spec, Fake(step_seconds=seconds, reserved_bytes=gib * 2**30))
    launch = replace(fake, health=Health(power_watts=watts), parameters=10**9)
    entry = Accepted(recorded_at=launch.started_at, reason="", launches=1, metrics={})
    return Baseline(
        id=spec.id,
        digest=spec.digest,
        machine=machine,
        spec=spec.to_dict(),
        recorded_by="t.py::t",
        launches=(launch,),
        anchor=entry,
        history=(entry,),
    )


def accept(
    old: Baseline | None,
    *,
    judged: Baseline | None,
    spec: Spec,
    machine: str,
    launches: Sequence[Launch],
    verdict: Verdict,
    checks: Sequence[Check],
    reason: str,
    recorded_at: str,
    recorded_by: str,
    changed: Sequence[str] = (),
) -> Baseline:
    """``acceptance.accept`` of a result with these figures."""
    result = CaseResult(
        id=spec.id,
        digest=spec.digest,
        nodeid=recorded_by,
        machine=machine,
        verdict=verdict,
        reason="",
        checks=tuple(checks),
        launches=tuple(launches),
        changed=tuple(changed),
    )
    metrics = {check.metric: check.value for check in checks}
    entry = Accepted(recorded_at=recorded_at, reason=reason, launches=len(launches), metrics=metrics)
    return acceptance.accept(old, judged=judged, spec=spec, result=result, entry=entry)


def keep(root: Path, *baselines: Baseline) -> Path:
    """Baselines as files under ``root``, as the store lays them out; ``root`` again."""
    for baseline in baselines:
        path = BaselineStore(root).path(baseline.machine, read_spec(baseline.spec))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(baseline), encoding="utf-8")
    return root


def llmperf_on(root: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``llmperf COMMAND …`` on the baselines under ``root``."""

    def run(command: str, *arguments: object) -> tuple[int, str, str]:
        code = main([*command.split(), "--perf-baselines", str(root), *map(str, arguments)])
        return code, *capsys.readouterr()

    return run
