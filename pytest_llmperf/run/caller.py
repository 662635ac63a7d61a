"""Caller: who asks for cases, a test or a command: on which terms, where findings go, who sees what happens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pytest_llmperf.judge.gain import Terms
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.records.result import CaseResult, Check, Reference, Verdict
from pytest_llmperf.run.case import Case
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.errors import CaseFailedError
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.observer import Observer
from pytest_llmperf.settings.train_spec import TrainSpec


@dataclass(frozen=True, kw_only=True)
class CaseTerms:
    """What a test's markers say, or whoever else asks for a case."""

    rung: str = ""
    reference: Reference | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """By metric."""
    oom_below_gib: float | None = None
    inactive: frozenset[str] = frozenset()
    efficiency: Terms = field(default_factory=Terms)
    parity: bool = False
    """Whether what it trains is held beside its plain form first."""
    loss_curve: int = 0
    """Of how many seeds its loss curve is held against those before; 0: of none."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """What every part of a case's way needs to know of who asked."""

    context: Context
    terms: CaseTerms
    findings: Findings
    observer: Observer
    nodeid: str
    """Its name, in results and baselines."""

    def result(
        self, case: Case, verdict: Verdict | Literal["planned"], reason: str, checks: tuple[Check, ...] = ()
    ) -> CaseResult:
        """The result of ``case``, without the launches that it is about."""
        return CaseResult(
            id=case.id,
            digest=case.digest,
            nodeid=self.nodeid,
            machine=self.context.machine_kind,
            verdict=verdict,
            reason=reason,
            checks=checks,
            notes=case.notes,
            reference=self.terms.reference,
            rung=self.terms.rung,
        )

    def policy(self, spec: TrainSpec) -> Policy:
        """What ``spec`` is judged by: the terms' tolerances, else its own, else the run's, else the machine's.

        Raises:
            CaseFailedError: a tolerance of 100 % or more on a GPU.
        """
        context = self.context
        policy = Policy.for_cpu() if context.on_cpu else Policy.for_gpu()
        policy = replace(policy, noise=context.experience.noise, rule=context.rule, knowledge=context.knowledge)
        of_spec = {
            RATE: spec.throughput_tolerance,
            MEMORY: spec.memory_tolerance,
        }
        for tolerances in (
            context.settings.tolerances,
            {metric: value for metric, value in of_spec.items() if value is not None},
            self.terms.tolerances,
        ):
            if not context.on_cpu:
                _refuse_per_cent(spec, tolerances)
            policy = policy.merged(tolerances)
        return policy


def _refuse_per_cent(spec: TrainSpec, tolerances: Mapping[str, float]) -> None:
    """Twice as slow may be a CPU's gate; on a GPU 1 was meant as 1 %."""
    for metric, tolerance in tolerances.items():
        if tolerance >= 1:
            raise CaseFailedError(
                f"{spec.id}: tolerance {metric}={tolerance:g}: on a GPU it must be below 1, e.g. 0.01 for 1 %"
            )
