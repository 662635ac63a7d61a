"""Recomputation: activations that are made again in the backward pass, and so need not be kept."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_llmperf.settings.liger import replaces_rope
from pytest_llmperf.settings.setting import (
    Axis,
    Choice,
    Evidence,
    Search,
    Setting,
    TrainSpec,
    at_default,
    claimed,
    equal,
)

# ``full`` recomputes whole layers; ``selective`` keeps what matrix products and attention gave.
CHECKPOINTING_POLICIES = ("full", "selective")
_FIELDS = ("gradient_checkpointing", "checkpointing_policy")


def _clash(spec: TrainSpec) -> str | None:
    if spec.checkpointing_policy == "full":
        return None
    if spec.attention == "flex_attention":
        return (
            "selective recomputation cannot keep what flex_attention gave; use another attention, or the policy 'full'"
        )
    if replaces_rope(spec):
        return (
            "Liger's rope kernel writes over the products that selective recomputation has kept, so that gradients are "
            "wrong and nothing says so; name the others in liger_kernels (a Llama has rms_norm, swiglu and "
            "fused_linear_cross_entropy), or use checkpointing_policy='full'"
        )
    return None


def _axis(base: TrainSpec, _search: Search) -> Axis:
    on = [
        Choice.of(policy, gradient_checkpointing=True, checkpointing_policy=policy)
        for policy in reversed(CHECKPOINTING_POLICIES)
    ]
    return Axis("checkpointing", (Choice.of("none", **at_default(*_FIELDS)(base)), *on))


@dataclass(frozen=True)
class RecomputationEvidence:
    """What is recomputed."""

    gradient_checkpointing: bool | None = None
    checkpointing_policy: str = "full"
    """Empty: nothing is recomputed. Older records knew one."""


def _recomputation(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = evidence.recomputation
    is_on = claimed(seen.gradient_checkpointing, "gradient_checkpointing")
    line = equal("gradient checkpointing", spec.gradient_checkpointing, is_on)
    if line or not spec.gradient_checkpointing:
        return line
    return equal("recomputation", spec.checkpointing_policy, seen.checkpointing_policy)


SETTING = Setting(
    name="recomputation",
    fields=_FIELDS,
    values={"checkpointing_policy": CHECKPOINTING_POLICIES},
    in_id={"gradient_checkpointing": "checkpointing", "checkpointing_policy": "{}"},
    switch="gradient_checkpointing",
    switched=_FIELDS[1:],
    clash=_clash,
    plain=at_default(*_FIELDS),
    axis=_axis,
    evidence=RecomputationEvidence,
    checks={"gradient_checkpointing": _recomputation},
)
