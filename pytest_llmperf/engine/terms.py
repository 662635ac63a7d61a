"""On which terms one case is judged, beside what its spec and the run say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.scaling_efficiency import Terms
from pytest_llmperf.records.result import Reference
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.errors import CaseFailedError
from pytest_llmperf.spec.train_spec import TrainSpec


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


def policy_of(spec: TrainSpec, context: Context, terms: CaseTerms) -> Policy:
    """What ``spec`` is judged by: the terms' tolerances, else its own, else the run's, else the machine's."""
    policy = Policy.for_cpu() if context.on_cpu else Policy.for_gpu()
    of_spec = {
        "tokens_per_second_per_gpu": spec.throughput_tolerance,
        "peak_reserved_bytes": spec.memory_tolerance,
    }
    for tolerances in (
        context.settings.tolerances,
        {metric: value for metric, value in of_spec.items() if value is not None},
        terms.tolerances,
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
