"""What is concluded of one case: its result, recorded where that is asked for, kept by the run and its SLURM job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.acceptance import accept, accept_capacity, describe, refuse_injected
from pytest_llmperf.judge.baseline import Baseline, CapacityBaseline
from pytest_llmperf.judge.store import Accepted, BaselineChangedError, BaselineError, not_in_git
from pytest_llmperf.judge.verdict import AT_THE_END, NEW
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.result import NOT_RECORDED, CaseResult
from pytest_llmperf.report.failure_message import different
from pytest_llmperf.run.case import Caller, Case
from pytest_llmperf.run.findings import CaseFailedError, Concluded, DidNotTrainError
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec, known_failure

_Figures = TypeVar("_Figures", Baseline, CapacityBaseline)


def earlier(caller: Caller, case: Case) -> Concluded | None:
    """What the job concluded of this case before it was requeued, where this run goes on with that."""
    kept = caller.run.job.find(caller.nodeid, case.digest)
    if not kept or caller.run.settings.dry_run:
        return None
    notes = tuple(dict.fromkeys((*kept.result.notes, "concluded before the job was requeued")))
    return _found(caller, case, replace(kept, result=replace(kept.result, notes=notes)))


def conclude(caller: Caller, case: Case, concluded: Concluded) -> Concluded:
    """Keep what was ``concluded``, and tell whether the case fails."""
    trouble = caller.run.job.keep(concluded)
    caller.run.notes += [trouble] if trouble else []
    return _found(caller, case, concluded)


def _found(caller: Caller, case: Case, concluded: Concluded) -> Concluded:
    run, result = caller.run, concluded.result
    fails = result.fails(strict=run.settings.strict)
    if fails and run.judges_later and not result.fails(strict=run.settings.strict, is_over=False):
        fails, result = False, replace(result, notes=tuple(dict.fromkeys((*result.notes, AT_THE_END))))
    caller.findings.results.append(result)
    # Two that took turns have no baseline to be accepted into; what was measured under a fault is never recorded.
    is_kept = bool(case.baselines) and not result.launches_before and not any(validity.injected(result.launches))
    return replace(concluded, result=result, fails=fails, is_acceptable=is_kept)


@contextmanager
def failures(caller: Caller, case: Case) -> Iterator[None]:
    """What ends ``case`` inside is kept as an invalid result of it. ``CaseFailedError``: its baseline cannot be used;
    ``DidNotTrainError``: a launch yielded no record."""
    try:
        yield
    except BaselineError as error:
        caller.findings.results.append(caller.result(case, "invalid", str(error)))
        raise CaseFailedError(str(error)) from None
    except LaunchFailed as error:
        spec, failure = case.spec(error.spec_id), error.failure
        # One of several that took turns is named.
        reason = failure.reason if error.spec_id == case.id else f"{error.spec_id}: {failure.reason}"
        result = replace(caller.result(case, "invalid", reason), **error.seen)
        baseline, differences = Recorder(caller).find(spec), tuple[str, ...]()
        if baseline is not None and failure.environment is not None:
            differences = baseline.launches[-1].environment.differences(failure.environment)
        caller.findings.results.append(replace(result, differences=differences))
        if failure.kind == "refused":
            raise DidNotTrainError(str(error)) from None  # nothing else can come of another run
        known = known_failure(spec) if isinstance(spec, TrainSpec) else None
        lines = [str(error), *validity.neighbours(failure.health), *([known] if known else []), *different(differences)]
        raise DidNotTrainError("\n".join(lines), may_train_again=True) from None


class Recorder:
    """The baselines of one run, as one caller sees them: what it measured is recorded where it asks and rules allow."""

    def __init__(self, caller: Caller) -> None:
        self._run, self._settings, self._nodeid = caller.run, caller.run.settings, caller.nodeid
        self._store = caller.run.store

    def find(self, spec: Spec) -> Baseline | None:
        """That of a case which is only compared with: a file that cannot be read is told where it is used."""
        try:
            return self._store.load(self._run.machine_kind, spec)
        except BaselineError:
            return None

    def wants(self, baseline: Baseline | CapacityBaseline | None) -> bool:
        return self._settings.update == "all" or (self._settings.update == "new" and baseline is None)

    def prepare(self, spec: Spec, baseline: Baseline | CapacityBaseline | None) -> None:
        """Before GPU time is spent: ``BaselineError`` where the run wants to record ``spec`` and cannot."""
        if not self.wants(baseline):
            return
        self._store.check_writable(self._run.machine_kind, spec)
        changed = self._run.revision.changed
        # A test that nobody has committed yet is what everybody records first, and replaces nothing.
        if changed and baseline is not None and not self._settings.reason:
            raise not_in_git(f"{spec.id}: not recorded over what is stored, ", changed)

    def recorded(
        self,
        result: CaseResult,
        baseline: _Figures | None,
        judge: Callable[[_Figures | None], CaseResult],
        record: Callable[[CaseResult, _Figures | None], CaseResult],
    ) -> tuple[CaseResult, _Figures | None, str]:
        """``result`` as ``record`` left it, what it was held against in the end, and why it was not recorded. Where
        another run has changed the baseline meanwhile, ``judge`` says it once more."""
        while self.wants(baseline):
            try:
                return record(result, baseline), baseline, ""
            except BaselineChangedError as error:
                baseline = error.now
                result = judge(baseline)
            except BaselineError as error:
                refused = f"{NOT_RECORDED}{error}"
                # A first one has no other reason.
                return (replace(result, reason=refused) if result.verdict == "new" else result), baseline, refused
        return result, baseline, ""

    def record(self, spec: Spec, result: CaseResult, judged: Baseline | None, disagreement: str = "") -> CaseResult:
        """``result``, held against ``judged``, with what was recorded of it; ``BaselineError``: nothing was."""
        if disagreement and not self._settings.reason:
            raise BaselineError(
                f"{spec.id}: {disagreement}; record it when the machine is quiet, or explain with --perf-reason"
            )
        change = partial(accept, judged=judged, spec=spec, result=result, entry=self._entry(result))
        old, new = self._store.update(self._run.machine_kind, spec, change)
        # What else its test has, or had, is not seen in a table that says "recorded".
        _, _, near = result.reason.partition(f"{NEW}; ") if old is None else ("", "", "")
        return replace(result, updated="\n".join([*describe(old, new), *([f"  {near}"] if near else [])]))

    def record_capacity(self, spec: Spec, result: CaseResult, judged: CapacityBaseline | None) -> CaseResult:
        """The same of a ``result`` whose first check is the largest micro-batch; nothing of one that is invalid."""
        if result.verdict == "invalid":
            return result
        entry = self._entry(result)
        new = CapacityBaseline(
            id=spec.capacity_id,
            digest=spec.capacity_digest,
            machine=self._run.machine_kind,
            spec=spec.to_dict(),
            recorded_by=self._nodeid,
            anchor=entry,
            history=(entry,),
        )

        def change(old: CapacityBaseline | None) -> CapacityBaseline:
            refuse_injected(new.id, result.launches)
            if old != judged:
                raise BaselineChangedError(new.id, old)
            return accept_capacity(old, new)

        old, stored = self._store.capacities.update(self._run.machine_kind, spec, change)
        return replace(result, updated="\n".join(describe(old, stored)))

    def _entry(self, result: CaseResult) -> Accepted:
        return Accepted(
            recorded_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            reason=self._settings.reason,
            launches=len(result.launches),
            metrics={check.metric: check.value for check in result.checks},
            revision=self._run.revision.commit,
            uncommitted=bool(self._run.revision.changed),
        )
