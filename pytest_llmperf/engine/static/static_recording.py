"""After a run that recorded: the same cases' static figures, told once nothing trains any more."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.engine.static.static_check import BESIDE_LAUNCHES, StaticChecks
from pytest_llmperf.engine.terms import CaseTerms
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.store import BaselineStore, read
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.errors import CannotRunError, CaseFailedError
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.observer import Observer
from pytest_llmperf.spec.train_spec import SpecError, TrainSpec


def record_static(context: Context, results: Sequence[CaseResult], observer: Observer) -> list[str]:
    """Record them beside what the run has recorded on GPUs; a line for each case of which there are none.

    Those of other versions stay: a CI machine's, which holds each change against them, need not be a GPU's.
    """
    recorded = _recorded(context, results)
    if not recorded or context.on_cpu:
        return []
    try:
        context.static_steps.ask(recorded)
    except OSError as error:  # no process, no pipe: the launches are recorded all the same
        return [f"no static figures: {error}"]
    notes = []
    for spec, recorded_by in recorded.items():
        caller = Caller(
            context=context, terms=CaseTerms(), findings=Findings(), observer=observer, nodeid="static figures"
        )
        try:
            concluded = StaticChecks(caller, BESIDE_LAUNCHES, context.machine_kind, recorded_by).check(spec)
        except (CannotRunError, CaseFailedError) as error:
            notes.append(f"no static figures: {error}")
            continue
        notes += [f"{spec.id}: {concluded.refused}"] if concluded.refused else []
    return notes


def _recorded(context: Context, results: Sequence[CaseResult]) -> dict[TrainSpec, str]:
    """What of ``results`` is in a baseline of launches now, and which test recorded it."""
    updated = {result.digest for result in results if result.updated}
    if not updated:
        return {}
    found = {}
    try:
        entries = BaselineStore(context.settings.baselines).entries(context.machine_kind)
        for entry in entries:
            baseline = read(entry.path, Baseline.from_json) if entry.digest in updated else None
            if baseline is not None and entry.copy_of is None:
                found[TrainSpec.from_dict(baseline.spec)] = baseline.recorded_by
    except (BaselineError, SpecError):
        return found
    return found
