"""Evidence: what a training tells of itself, by setting; read from a record, and held against a spec.

A training may tell of none of it: what is not claimed is neither true nor false.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_llmperf.settings.attention import AttentionEvidence
from pytest_llmperf.settings.compilation import CompilationEvidence
from pytest_llmperf.settings.data import DataEvidence
from pytest_llmperf.settings.liger import LigerEvidence
from pytest_llmperf.settings.optimizer import OptimizerEvidence
from pytest_llmperf.settings.parallelism import ParallelismEvidence
from pytest_llmperf.settings.precision import PrecisionEvidence
from pytest_llmperf.settings.recomputation import RecomputationEvidence
from pytest_llmperf.settings.registry import SETTINGS
from pytest_llmperf.settings.setting import NotClaimedError, Setting, TrainSpec, claimed, equal, read_evidence
from pytest_llmperf.settings.weights import WeightsEvidence
from pytest_llmperf.support.user_input import hint

#: What no setting asks for and each launch shows; a model of which a part is never trained declares it.
LEARNING = "learning"


@dataclass(frozen=True)
class RunEvidence:
    """What a run tells beside its settings."""

    device_type: str = "cpu"
    injected: str = ""
    """The faults that the environment asked for."""
    allocator_retries: int | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    """What the user's environment had set of all that a launch forces."""
    setup: Mapping[str, Any] = field(default_factory=dict)
    """By topic, the objects that trained (``worker/setup.py``)."""
    uncollected: Mapping[str, str] = field(default_factory=dict)
    """What of the evidence could not be collected, and why."""
    other_ranks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What other ranks saw differently, by name and then by rank."""
    remarks: Sequence[str] | None = None
    """What was asked for and is not done, a line each."""
    start: str | None = None
    """``warm`` or ``cold``."""
    ended: str | None = None
    slurm_nodes: str | None = None
    slurm_switches: str | None = None

    @property
    def is_on_gpu(self) -> bool:
        return self.device_type != "cpu"

    @property
    def torch(self) -> Mapping[str, Any]:
        """Settings of PyTorch that no environment variable says."""
        found: Mapping[str, Any] = self.setup.get("torch", {})
        return found


@dataclass(frozen=True)
class Evidence:
    """All that a training tells of itself."""

    run: RunEvidence
    precision: PrecisionEvidence
    attention: AttentionEvidence
    liger: LigerEvidence
    compilation: CompilationEvidence
    recomputation: RecomputationEvidence
    optimizer: OptimizerEvidence
    parallelism: ParallelismEvidence
    data: DataEvidence
    weights: WeightsEvidence

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Evidence:
        """As a record holds it, of any age."""
        kinds = {setting.name: setting.evidence for setting in SETTINGS if setting.evidence}
        return cls(
            run=read_evidence(RunEvidence, stored),
            **{name: read_evidence(kind, stored) for name, kind in kinds.items()},
        )


def declarable() -> tuple[str, ...]:
    """The settings that can be declared to change nothing, since evidence tells."""
    return (*(name for setting in SETTINGS for name in setting.checks), LEARNING)


def undeclarable(inactive: frozenset[str]) -> Iterator[str]:
    """A line for each name that cannot be declared inactive."""
    known = declarable()
    for name in sorted(inactive.difference(known)):
        yield f"{name!r} cannot be declared inactive{hint(name, known) or '; known: ' + ', '.join(known)}"


def contradictions(spec: TrainSpec, evidence: Evidence, inactive: frozenset[str]) -> Iterator[str]:
    """A line for each setting that was not what ``spec`` asked for; of ``inactive`` ones, for each that was.

    What is not claimed contradicts nothing, but where the spec asks for more than the default or collecting it failed.
    """
    usual = type(spec)
    for setting in SETTINGS:
        for name, check in setting.checks.items():
            if name in setting.moot_on_cpu and not evidence.run.is_on_gpu:
                continue
            try:
                line = _equal(setting, name, check, spec, evidence) if isinstance(check, str) else check(spec, evidence)
            except NotClaimedError as missing:
                if getattr(spec, name) != getattr(usual, name) or evidence.run.uncollected:
                    failed = "; ".join(f"{own}: {why}" for own, why in evidence.run.uncollected.items())
                    why = f" (collecting it failed: {failed})" if failed else ""
                    yield f"no evidence of {missing} was recorded{why}"
                continue
            declared = name in inactive and getattr(spec, name) not in (False, "no")
            if declared and line is None:
                yield f"{name} was declared to be inactive, and was active"
            elif line is not None and not declared:
                yield line


def _equal(setting: Setting, name: str, words: str, spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = getattr(getattr(evidence, setting.name), name)
    return equal(words, getattr(spec, name), claimed(seen, name))


def lost(
    spec: TrainSpec, launches: Sequence[Evidence], reference: Sequence[Evidence], inactive: frozenset[str]
) -> Iterator[str]:
    """A line for each setting that did more in ``reference``, launches of a baseline, than it does in ``launches``."""
    for setting in SETTINGS:
        line = setting.lost(spec, launches, reference) if inactive.isdisjoint(setting.checks) else None
        if line is not None:
            yield line
