"""What is concluded of one case: its result, kept in the run's findings and in its SLURM job's journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.engine.terms import CaseTerms
from pytest_llmperf.judge import validity
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import FAILING, CaseResult
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.errors import CaseFailedError, DidNotTrainError
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.journal import Kept
from pytest_llmperf.spec.known_failures import known_failure
from pytest_llmperf.spec.train_spec import TrainSpec

_BEFORE = "concluded before the job was requeued"

_FAILING_IF_STRICT = FAILING | {"improved", "inconclusive"}


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
    """Of the cases that one test asks for."""

    def __init__(self, context: Context, terms: CaseTerms, findings: Findings, nodeid: str) -> None:
        self._context, self._terms, self._findings, self._nodeid = context, terms, findings, nodeid

    def result(self, spec: TrainSpec, verdict: str = "", reason: str = "") -> CaseResult:
        """One without figures."""
        return CaseResult(
            id=spec.id,
            digest=spec.digest,
            nodeid=self._nodeid,
            machine=self._context.machine_kind,
            verdict=verdict,
            reason=reason,
            reference=self._terms.reference,
            rung=self._terms.rung,
        )

    def earlier(self, digest: str) -> Conclusion | None:
        """What the job concluded of this case before it was requeued, where this run goes on with that."""
        kept = self._context.job and self._context.job.journal.find(self._nodeid, digest)
        if not kept or self._context.settings.dry_run:
            return None
        result = replace(kept.result, notes=tuple(dict.fromkeys((*kept.result.notes, _BEFORE))))
        in_turns = bool(result.launches_before)
        return self._concluded(result, kept.held_against, kept.refused, in_turns=in_turns)

    def begun(self, digest: str) -> tuple[Launch, ...]:
        """What the job has launched of this case, and not concluded, before it was requeued."""
        job = self._context.job
        return () if job is None else job.begun(self._nodeid, digest)

    def begin(self, digest: str, launches: Sequence[Launch]) -> None:
        """Keep launches that decide nothing yet for a start that goes on with them."""
        if self._context.job is not None:
            self._context.job.begin(self._nodeid, digest, launches)

    def conclude(self, result: CaseResult, held_against: str = "none", refused: str = "") -> Conclusion:
        """Keep ``result``, and tell whether the case holds or was recorded."""
        if self._context.job is not None:
            trouble = self._context.job.keep(Kept(result, held_against, refused))
            self._context.notes += [trouble] if trouble else []
        return self._concluded(result, held_against, refused, in_turns=False)

    def conclude_turns(self, result: CaseResult, other: str) -> Conclusion:
        """The same of two that took turns: there is no baseline to accept it into."""
        held_against = f"turns with {other}"
        return replace(self.conclude(result, held_against), is_acceptable=False)

    def _concluded(self, result: CaseResult, held_against: str, refused: str, *, in_turns: bool) -> Conclusion:
        self._findings.results.append(result)
        strict = self._context.settings.strict
        fails = result.verdict in (_FAILING_IF_STRICT if strict else FAILING) or (strict and bool(result.changed))
        return Conclusion(
            result=result,
            held_against=held_against,
            refused=refused,
            fails=fails and not result.updated,
            # What was measured under a fault is never recorded.
            is_acceptable=not in_turns and not any(validity.injected(result.launches)),
        )

    def launch_failed(self, result: CaseResult, error: LaunchFailed, spec: TrainSpec) -> DidNotTrainError:
        """``result`` kept as invalid, and what to raise for it."""
        reason = error.failure.reason
        if error.spec_id != result.id:  # one of several that took turns
            reason = f"{error.spec_id}: {reason}"
        self._findings.results.append(replace(result, verdict="invalid", reason=reason))
        if error.failure.kind == "refused":
            return DidNotTrainError(str(error))  # nothing else can come of another run
        known = known_failure(spec)
        lines = [str(error), *validity.neighbours(error.failure.health), *([known] if known else [])]
        return DidNotTrainError("\n".join(lines), may_train_again=True)

    def unusable(self, result: CaseResult, error: BaselineError) -> CaseFailedError:
        """``result`` kept as invalid for its baseline, and what to raise for it."""
        self._findings.results.append(replace(result, verdict="invalid", reason=str(error)))
        return CaseFailedError(str(error))
