"""What is concluded of one case: its result, kept in the run's findings and in its SLURM job's journal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.engine.case import Case
from pytest_llmperf.engine.recorder import Recorder
from pytest_llmperf.judge import validity
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.result import FAILING, FAILING_IF_STRICT, PLANNED, CaseResult
from pytest_llmperf.report.failure_message import different
from pytest_llmperf.run.errors import CaseFailedError, DidNotTrainError
from pytest_llmperf.run.journal import Kept
from pytest_llmperf.spec.known_failures import known_failure
from pytest_llmperf.spec.train_spec import TrainSpec

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
        kept = self._context.job and self._context.job.journal.find(self._caller.nodeid, case.digest)
        if not kept or self._context.settings.dry_run:
            return None
        result = replace(kept.result, notes=tuple(dict.fromkeys((*kept.result.notes, _BEFORE))))
        return self._concluded(result, kept.held_against, kept.refused)

    def conclude(self, result: CaseResult, held_against: str = "none", refused: str = "") -> Conclusion:
        """Keep ``result``, and tell whether the case holds or was recorded."""
        if self._context.job is not None:
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
