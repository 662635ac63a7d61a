"""What is concluded of one case: its result, kept in the run's findings and in its SLURM job's journal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.acceptance import accept, refuse_injected
from pytest_llmperf.judge.baseline import Baseline, describe
from pytest_llmperf.judge.baseline_file import Accepted, BaselineChangedError, BaselineError
from pytest_llmperf.judge.batch_size_baseline import CapacityBaseline, accept_capacity, describe_capacity
from pytest_llmperf.judge.store import BaselineStore
from pytest_llmperf.judge.verdict import NEW
from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.result import FAILING, FAILING_IF_STRICT, PLANNED, CaseResult
from pytest_llmperf.report.failure_message import different
from pytest_llmperf.run.caller import Caller
from pytest_llmperf.run.case import Case
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.errors import CaseFailedError, DidNotTrainError
from pytest_llmperf.run.journal import Kept
from pytest_llmperf.settings.train_spec import TrainSpec, known_failure

# Recorder: puts what a case measured into its baseline, where the run asks for it and the rules allow it.


_MOST_FILES = 3

_Figures = TypeVar("_Figures", Baseline, CapacityBaseline)


@dataclass(frozen=True)
class Recorded(Generic[_Figures]):
    """What became of a result that the run asked to record."""

    result: CaseResult
    """With what was recorded."""
    baseline: _Figures | None
    """What it was held against; where it is overtaken, what it has to be held against now."""
    refused: str = ""
    """Why nothing was recorded."""
    is_overtaken: bool = False
    """Whether another run has changed the baseline meanwhile: the result has to be judged once more."""


class Recorder:
    """The baselines of one run, as one caller sees them."""

    def __init__(self, context: Context, nodeid: str) -> None:
        self._context, self._settings, self._nodeid = context, context.settings, nodeid
        self._store = BaselineStore(context.settings.baselines)

    def load(self, spec: TrainSpec) -> Baseline | None:
        """The baseline of ``spec``, if there is one.

        Raises:
            BaselineError: it cannot be read.
        """
        return self._store.load(self._context.machine_kind, spec)

    def find(self, spec: TrainSpec) -> Baseline | None:
        """The same for a case that is only compared with: a file that cannot be read is told of where it is used."""
        try:
            return self.load(spec)
        except BaselineError:
            return None

    def load_capacity(self, spec: TrainSpec) -> CapacityBaseline | None:
        """The largest micro-batch of ``spec``, if one was recorded.

        Raises:
            BaselineError: it cannot be read.
        """
        return self._store.capacities.load(self._context.machine_kind, spec)

    def prepare(self, spec: TrainSpec, baseline: Baseline | CapacityBaseline | None) -> None:
        """Find out, before GPU time is spent, whether ``spec`` can be recorded if the run asks for it.

        Raises:
            BaselineError: it cannot, and why.
        """
        if self.wants(baseline):
            self._store.check_writable(self._context.machine_kind, spec)
            changed = self._context.revision.changed
            # A test that nobody has committed yet is what everybody records first, and replaces nothing.
            if changed and baseline is not None and not self._settings.reason:
                more = f" and {len(changed) - _MOST_FILES} more" if len(changed) > _MOST_FILES else ""
                raise BaselineError(
                    f"{spec.id}: not recorded over what is stored, the working tree has uncommitted changes "
                    f"({', '.join(changed[:_MOST_FILES])}{more}); commit them, or say why with --perf-reason"
                )

    def wants(self, baseline: Baseline | CapacityBaseline | None) -> bool:
        """Whether this run records a case with this baseline."""
        return self._settings.update == "all" or (self._settings.update == "new" and baseline is None)

    def record_capacity(
        self, spec: TrainSpec, result: CaseResult, judged: CapacityBaseline | None
    ) -> Recorded[CapacityBaseline]:
        """What became of ``result``, whose first check is the largest micro-batch, held against ``judged``."""
        entry = self._entry(result)
        new = CapacityBaseline(
            id=spec.capacity_id,
            digest=spec.capacity_digest,
            machine=self._context.machine_kind,
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

        try:
            old, stored = self._store.capacities.update(self._context.machine_kind, spec, change)
        except BaselineError as error:
            return _not_recorded(result, judged, error)
        return Recorded(replace(result, updated="\n".join(describe_capacity(old, stored))), judged)

    def record(
        self, spec: TrainSpec, result: CaseResult, judged: Baseline | None, disagreement: str = ""
    ) -> Recorded[Baseline]:
        """What became of ``result``, which was held against ``judged``.

        ``disagreement`` says that its launches are not of one speed.
        """
        if disagreement and not self._settings.reason:
            refused = (
                f"not recorded: {spec.id}: {disagreement}; record it when the machine is quiet, or say with "
                "--perf-reason that it is never quieter"
            )
            return Recorded(result, judged, refused)
        change = partial(accept, judged=judged, spec=spec, result=result, entry=self._entry(result))
        try:
            old, new = self._store.update(self._context.machine_kind, spec, change)
        except BaselineError as error:
            return _not_recorded(result, judged, error)
        # What else its test has, or had, is not seen in a table that says "recorded".
        _, _, near = result.reason.partition(f"{NEW}; ") if old is None else ("", "", "")
        lines = [*describe(old, new), *([f"  {near}"] if near else [])]
        return Recorded(replace(result, updated="\n".join(lines)), judged)

    def _entry(self, result: CaseResult) -> Accepted:
        return Accepted(
            recorded_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            reason=self._settings.reason,
            launches=len(result.launches),
            metrics={check.metric: check.value for check in result.checks},
            revision=self._context.revision.commit,
            uncommitted=bool(self._context.revision.changed),
        )


def _not_recorded(result: CaseResult, judged: _Figures | None, error: BaselineError) -> Recorded[_Figures]:
    if isinstance(error, BaselineChangedError):
        return Recorded(result, error.now, is_overtaken=True)
    return Recorded(result, judged, f"not recorded: {error}")


_BEFORE = "concluded before the job was requeued"


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """One case, concluded or planned."""

    result: CaseResult
    held_against: str = "none"
    """For people: how much of a baseline, or what took turns with it."""
    refused: str = ""
    """Why it was not recorded, where the run asked for that."""
    fails: bool = False
    """Whether the case does not hold, and was not recorded either."""
    is_acceptable: bool = True
    """Whether its figures are of the kind that baselines keep."""


class Conclusions:
    """Of the cases that one caller asks for."""

    def __init__(self, caller: Caller) -> None:
        self._caller, self._context, self._findings = caller, caller.context, caller.findings

    def planned(self, case: Case, why: str) -> Conclusion:
        """Of a case that is not launched, and ``why``; the test goes on to its next."""
        return Conclusion(result=self._caller.result(case, PLANNED, why))

    def earlier(self, case: Case) -> Conclusion | None:
        """What the job concluded of this case before it was requeued, where this run goes on with that."""
        kept = self._context.job.find(self._caller.nodeid, case.digest)
        if not kept or self._context.settings.dry_run:
            return None
        result = replace(kept.result, notes=tuple(dict.fromkeys((*kept.result.notes, _BEFORE))))
        return self._concluded(result, kept.held_against, kept.refused)

    def conclude(self, result: CaseResult, held_against: str = "none", refused: str = "") -> Conclusion:
        """Keep ``result``, and tell whether the case holds or was recorded."""
        trouble = self._context.job.keep(Kept(result, held_against, refused))
        self._context.notes += [trouble] if trouble else []
        return self._concluded(result, held_against, refused)

    def _concluded(self, result: CaseResult, held_against: str, refused: str) -> Conclusion:
        self._findings.results.append(result)
        strict = self._context.settings.strict
        fails = result.verdict in (FAILING_IF_STRICT if strict else FAILING) or (strict and bool(result.changed))
        # Two that took turns have no baseline to be accepted into; what was measured under a fault is never recorded.
        is_acceptable = not result.launches_before and not any(validity.injected(result.launches))
        return Conclusion(
            result=result,
            held_against=held_against,
            refused=refused,
            fails=fails and not result.updated,
            is_acceptable=is_acceptable,
        )

    @contextmanager
    def failures(self, case: Case) -> Iterator[None]:
        """What ends ``case`` inside is kept as an invalid result of it.

        Raises:
            CaseFailedError: its baseline cannot be used, or a launch yielded no record (``DidNotTrainError``).
        """
        try:
            yield
        except BaselineError as error:
            self._invalid(case, str(error))
            raise CaseFailedError(str(error)) from None
        except LaunchFailed as error:
            spec, reason = case.spec(error.spec_id), error.failure.reason
            if error.spec_id != case.id:  # one of several that took turns
                reason = f"{error.spec_id}: {reason}"
            differences = self._differences(spec, error.failure)
            self._invalid(case, reason, differences)
            if error.failure.kind == "refused":
                raise DidNotTrainError(str(error)) from None  # nothing else can come of another run
            known = known_failure(spec)
            lines = [str(error), *validity.neighbours(error.failure.health), *([known] if known else [])]
            lines += different(differences)
            raise DidNotTrainError("\n".join(lines), may_train_again=True) from None

    def _differences(self, spec: TrainSpec, failure: Failure) -> tuple[str, ...]:
        """What is not as it was when ``spec`` still trained."""
        baseline = Recorder(self._context, self._caller.nodeid).find(spec)
        if baseline is None or failure.environment is None:
            return ()
        return baseline.launches[-1].environment.differences(failure.environment)

    def _invalid(self, case: Case, reason: str, differences: tuple[str, ...] = ()) -> None:
        result = self._caller.result(case, "invalid", reason)
        self._findings.results.append(replace(result, differences=differences))
