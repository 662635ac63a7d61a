"""Experts: which implementation computes those of a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.settings.setting import Axis, Evidence, Setting, TrainSpec, at_default, claimed, equal

#: transformers' words; ``auto``: its own choice.
_EXPERTS = ("auto", "eager", "batched_mm", "grouped_mm")
# What the operators are called that multiply by their weights; eager's are plain products, one after the other.
_KERNELS: Mapping[str, str] = {"batched_mm": "bmm", "grouped_mm": "_grouped_mm"}


def has_experts(spec: TrainSpec) -> bool:
    return any("expert" in name and value for name, value in spec.architecture.config.items())


def _clash(spec: TrainSpec) -> str | None:
    if spec.experts == "auto":
        return None
    if not has_experts(spec):
        return f"experts={spec.experts!r} acts on a mixture of experts, and {spec.architecture.model_type} has none"
    if spec.liger and (spec.liger_kernels == "all" or "swiglu" in spec.liger_kernels):
        return (
            "Liger's swiglu kernel computes experts in its own way; name others in liger_kernels (rope, rms_norm, "
            "fused_linear_cross_entropy), or use experts='auto'"
        )
    return None


@dataclass(frozen=True)
class ExpertsEvidence:
    """How experts were computed; nothing of a model that has none."""

    experts: str | None = None
    """The implementation that the modules were given; empty: something else runs in their place."""
    experts_kernel: str | None = None
    """The products that one more sequence called in there."""

    def runs(self, experts: str) -> bool:
        kernel = self.experts_kernel or "unknown"
        seen = {name for name, mark in _KERNELS.items() if f".{mark}." in kernel} or {"eager"}
        return kernel == "unknown" or seen == {experts}


def _experts(spec: TrainSpec, evidence: Evidence) -> str | None:
    if spec.experts == "auto":
        return None
    seen = evidence.experts
    line = equal("experts", spec.experts, claimed(seen.experts, "experts") or "another implementation")
    if line or seen.runs(spec.experts):
        return line
    return f"asked for experts {spec.experts}, the operators that ran were {seen.experts_kernel}"


def _lost(spec: TrainSpec, launches: Sequence[Evidence], reference: Sequence[Evidence]) -> str | None:
    """A line where transformers' own choice was grouped products in ``reference``, and is that no more."""
    had = any("_grouped_mm" in (each.experts.experts_kernel or "") for each in reference)
    now = (each.experts.experts_kernel for each in launches if not each.experts.runs("grouped_mm"))
    kernel = next(now, None) if had and spec.experts == "auto" else None
    return kernel and (
        f"its experts' grouped products were lost: they ran by {kernel} "
        "(if that is meant, remove the baseline and record it anew)"
    )


SETTING = Setting(
    name="experts",
    fields=("experts",),
    values={"experts": _EXPERTS},
    # Eager is attention's word, too.
    in_id={"experts": lambda spec: {"auto": "", "eager": "experts-loop"}.get(spec.experts, f"experts-{spec.experts}")},
    clash=_clash,
    plain=at_default("experts"),
    axis=lambda base, _: Axis.over("experts", _EXPERTS) if has_experts(base) else None,
    evidence=ExpertsEvidence,
    checks={"experts": _experts},
    lost=_lost,
)
