"""What a test concludes: each case's result, kept and told, and the failure where it does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.plugin import benchmark, commands
from pytest_llmperf.plugin.markers import Marks
from pytest_llmperf.plugin.outcomes import did_not_train, failed
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.failure_message import failure_message
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.journal import Kept
from pytest_llmperf.spec.known_failures import known_failure
from pytest_llmperf.spec.train_spec import TrainSpec

_BEFORE = "concluded before the job was requeued"


class Conclusions:
    """Of one test's cases."""

    def __init__(self, request: pytest.FixtureRequest, session: PerfSession, marks: Marks, findings: Findings) -> None:
        self._request, self._session, self._marks, self._findings = request, session, marks, findings
        self._item: pytest.Item = request.node

    def result(self, spec: TrainSpec, verdict: str = "", reason: str = "") -> CaseResult:
        """One without figures."""
        return CaseResult(
            id=spec.id,
            digest=spec.digest,
            nodeid=self._item.nodeid,
            machine=self._session.machine_kind,
            verdict=verdict,
            reason=reason,
            reference=self._marks.reference,
            rung=self._marks.rung,
        )

    def earlier(self, digest: str) -> tuple[CaseResult, str, str] | None:
        """What the job concluded of this case before it was requeued, where this run goes on with that."""
        kept = self._session.job and self._session.job.journal.find(self._item.nodeid, digest)
        if not kept or self._session.settings.dry_run:
            return None
        result = replace(kept.result, notes=tuple(dict.fromkeys((*kept.result.notes, _BEFORE))))
        return result, kept.held_against, kept.refused

    def begun(self, digest: str) -> tuple[Launch, ...]:
        """What the job has launched of this case, and not concluded, before it was requeued."""
        job = self._session.job
        return () if job is None else job.begun(self._item.nodeid, digest)

    def begin(self, digest: str, launches: Sequence[Launch]) -> None:
        """Keep launches that decide nothing yet for a start that goes on with them."""
        if self._session.job is not None:
            self._session.job.begin(self._item.nodeid, digest, launches)

    def conclude(self, result: CaseResult, held_against: str = "none", refused: str = "") -> CaseResult:
        """Keep ``result``, and fail the test unless it holds or was recorded."""
        self._findings.results.append(result)
        if self._session.job is not None and _BEFORE not in result.notes:
            trouble = self._session.job.keep(Kept(result, held_against, refused))
            self._session.notes += [trouble] if trouble else []
        benchmark.record(self._request, result)
        failing = {"invalid", "regressed", "new"}
        failing |= {"improved", "inconclusive"} if self._session.settings.strict else set()
        if refused and result.verdict not in failing:
            raise failed(f"{result.id}: {refused}")
        # In turns there is no baseline to accept it into, and what was measured under a fault is never recorded.
        never = held_against.startswith("turns") or any(validity.injected(result.launches))
        is_silent = self._session.settings.strict and bool(result.changed)
        if (result.verdict in failing or is_silent) and not result.updated:
            message = failure_message(
                result,
                rerun=commands.rerun(self._item, self._session),
                accept="" if never else commands.accept(self._item, self._session, result),
                baseline=held_against,
            )
            raise failed("\n".join(filter(None, [message, refused])))
        return result

    def launch_failed(self, result: CaseResult, error: LaunchFailed, spec: TrainSpec) -> BaseException:
        """``result`` kept as invalid, and what to raise for it."""
        reason = error.failure.reason
        if error.spec_id != result.id:  # one of several that took turns
            reason = f"{error.spec_id}: {reason}"
        self._findings.results.append(replace(result, verdict="invalid", reason=reason))
        if error.failure.kind == "refused":
            return did_not_train(str(error))  # nothing else can come of another run
        known = known_failure(spec)
        lines = [str(error), *validity.neighbours(error.failure.health), *([known] if known else [])]
        return did_not_train("\n".join([*lines, f"run it again: {commands.rerun(self._item, self._session)}"]))

    def unusable(self, result: CaseResult, error: BaselineError) -> BaseException:
        """``result`` kept as invalid for its baseline, and what to raise for it."""
        self._findings.results.append(replace(result, verdict="invalid", reason=str(error)))
        return failed(str(error))
