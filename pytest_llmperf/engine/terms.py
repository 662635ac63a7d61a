"""The tolerances of one case: its marker's, else its spec's, else the ini file's, else the machine's own."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.plugin.markers import Marks
from pytest_llmperf.plugin.outcomes import failed
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.spec.train_spec import TrainSpec


def policy_of(spec: TrainSpec, session: PerfSession, marks: Marks) -> Policy:
    """What ``spec`` is judged by in a test with ``marks``."""
    policy = Policy.for_cpu() if session.on_cpu else Policy.for_gpu()
    of_spec = {
        "tokens_per_second_per_gpu": spec.throughput_tolerance,
        "peak_reserved_bytes": spec.memory_tolerance,
    }
    for tolerances in (
        session.settings.tolerances,
        {metric: value for metric, value in of_spec.items() if value is not None},
        marks.tolerances,
    ):
        if not session.on_cpu:
            _refuse_per_cent(spec, tolerances)
        policy = policy.merged(tolerances)
    return policy


def _refuse_per_cent(spec: TrainSpec, tolerances: Mapping[str, float]) -> None:
    """Twice as slow may be a CPU's gate; on a GPU 1 was meant as 1 %."""
    for metric, tolerance in tolerances.items():
        if tolerance >= 1:
            raise failed(f"{spec.id}: tolerance {metric}={tolerance:g}: on a GPU it must be below 1, e.g. 0.01 for 1 %")
