"""Compilation: torch.compile, of the whole model or layer by layer; activations made again, or kept by the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.settings.attention import FLASH
from pytest_llmperf.settings.parallelism import is_sharded
from pytest_llmperf.settings.setting import Axis, Evidence, Search, Setting, TrainSpec, at_default, claimed, equal

# ``layers`` compiles each repeated layer by itself and leaves the rest alone: PyTorch's regional compilation.
_SCOPES = ("model", "layers")
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CAPTURED = ("reduce-overhead", "max-autotune")
_FIELDS = ("torch_compile", "torch_compile_mode", "torch_compile_scope")


def is_autotuned(mode: str) -> bool:
    """Whether the compiler chooses kernels by timing them: nearly tied ones change from process to process."""
    return mode.startswith("max-autotune")


def is_compiled(spec: TrainSpec) -> bool:
    return spec.torch_compile


def _axis(base: TrainSpec, _search: Search) -> Axis:
    choices = {"no": at_default(*_FIELDS)(base)}
    for mode in _MODES:
        for scope in reversed(_SCOPES):
            name = scope if mode == "default" else f"{scope} {mode}"
            choices[name] = {"torch_compile": True, "torch_compile_scope": scope, "torch_compile_mode": mode}
    return Axis.of("compile", choices)


@dataclass(frozen=True)
class CompilationEvidence:
    """What the compiler did; records from before a field did what is its default now."""

    torch_compile: bool | None = None
    torch_compile_mode: str = "default"
    """Empty: not compiled. The same of the scope."""
    torch_compile_scope: str = "model"
    compiled_modules: Sequence[str] | None = None
    """The kinds of the modules that are compiled, each by itself."""
    compiled_graphs: int | None = None
    cuda_graphs: int | None = None
    """How many were captured of what was compiled."""
    graph_breaks: int | None = None
    recompilations: int | None = None

    @property
    def is_compiled(self) -> bool:
        return bool(self.compiled_graphs or self.torch_compile)


def _compile(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = evidence.compilation
    line = equal("torch_compile", spec.torch_compile, claimed(seen.torch_compile, "torch_compile"))
    if line or not spec.torch_compile:
        return line
    if seen.compiled_graphs == 0:
        return "asked for torch_compile, no graph was compiled"
    if seen.cuda_graphs == 0 and evidence.run.is_on_gpu and spec.torch_compile_mode in _CAPTURED:
        return f"asked for torch_compile_mode={spec.torch_compile_mode!r}, no CUDA graph was captured"
    mode = equal("torch_compile's mode", spec.torch_compile_mode, seen.torch_compile_mode)
    return mode or equal("torch_compile's scope", spec.torch_compile_scope, seen.torch_compile_scope)


SETTING = Setting(
    name="compilation",
    fields=_FIELDS,
    values={"torch_compile_mode": _MODES, "torch_compile_scope": _SCOPES},
    in_id={"torch_compile": "compile", "torch_compile_scope": "{}", "torch_compile_mode": "{}"},
    switch="torch_compile",
    switched=_FIELDS[1:],
    plain=at_default(*_FIELDS),
    axis=_axis,
    evidence=CompilationEvidence,
    checks={"torch_compile": _compile},
)


# Recomputation: activations that are made again in the backward pass, and so need not be kept.

# ``full`` recomputes whole layers; ``selective`` keeps what matrix products and attention gave.
CHECKPOINTING_POLICIES = ("full", "selective")
_RECOMPUTED = ("gradient_checkpointing", "checkpointing_policy")


def _clash(spec: TrainSpec) -> str | None:
    if spec.checkpointing_policy == "full":
        return None
    if spec.attention in ("flex_attention", FLASH[1]):
        return (
            f"selective recomputation cannot keep what {spec.attention} gave; use another attention, or the policy "
            "'full'"
        )
    if spec.liger and (spec.liger_kernels == "all" or "rope" in spec.liger_kernels):
        return (
            "Liger's rope kernel writes over the products that selective recomputation has kept, so that gradients are "
            "wrong and nothing says so; name the others in liger_kernels (a Llama has rms_norm, swiglu and "
            "fused_linear_cross_entropy), or use checkpointing_policy='full'"
        )
    return None


def _recomputed_axis(base: TrainSpec, _search: Search) -> Axis:
    policies = reversed(CHECKPOINTING_POLICIES)
    on = {policy: {"gradient_checkpointing": True, "checkpointing_policy": policy} for policy in policies}
    return Axis.of("checkpointing", {"none": at_default(*_RECOMPUTED)(base), **on})


@dataclass(frozen=True)
class RecomputationEvidence:
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


RECOMPUTATION = Setting(
    name="recomputation",
    fields=_RECOMPUTED,
    values={"checkpointing_policy": CHECKPOINTING_POLICIES},
    in_id={"gradient_checkpointing": "checkpointing", "checkpointing_policy": "{}"},
    switch="gradient_checkpointing",
    switched=_RECOMPUTED[1:],
    clash=_clash,
    plain=at_default(*_RECOMPUTED),
    axis=_recomputed_axis,
    evidence=RecomputationEvidence,
    checks={"gradient_checkpointing": _recomputation},
)


# Offloading: activations that wait for the backward pass in the host's memory.


def _offloading_clash(spec: TrainSpec) -> str | None:
    if spec.offloading == "no":
        return None
    if spec.torch_compile:
        return "compiled code keeps its activations to itself; leave torch_compile or offloading out"
    if is_sharded(spec):
        return f"offloading would move the weights that {spec.parallelism} gathers, too; use parallelism='ddp'"
    return None


@dataclass(frozen=True)
class OffloadingEvidence:
    offloaded_bytes: int | None = None
    """By the last forward pass; nothing where it was not asked for."""


def _offloading(spec: TrainSpec, evidence: Evidence) -> str | None:
    moved = evidence.offloading.offloaded_bytes or 0
    is_as_asked = (spec.offloading != "no") == (moved > 0)
    return None if is_as_asked else f"asked for offloading={spec.offloading!r}, {moved} bytes were moved"


OFFLOADING = Setting(
    name="offloading",
    fields=("offloading",),
    values={"offloading": ("no", "activations")},
    in_id={"offloading": "offload-{}"},
    clash=_offloading_clash,
    why_not_on_cpu=lambda spec: None if spec.offloading == "no" else "a CPU has its activations in its memory already",
    plain=at_default("offloading"),
    evidence=OffloadingEvidence,
    checks={"offloading": _offloading},
)
