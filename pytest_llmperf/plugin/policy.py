"""The tolerances of one case: its marker's, else its spec's, else the ini file's, else the machine's own."""

from __future__ import annotations

from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.plugin.marks import Marks
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.spec import TrainSpec


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
        policy = policy.merged(tolerances)
    return policy
