"""Attention: which implementation computes it, and by which of PyTorch's kernels; and which a mixture's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llmperf.settings.precision import is_16_bit
from pytest_llmperf.settings.setting import Axis, Evidence, Package, Search, Setting, TrainSpec, claimed, equal

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flex_attention", "flash_attention_3")
#: Kernels of packages of their own, of 16 bits and on a GPU alone.
FLASH = ("flash_attention_2", "flash_attention_3")
#: SDPA's kernels as torch.nn.attention.SDPBackend calls them; ``auto``: PyTorch's choice; ``math`` is not fused.
SDPA_BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")

_PACKAGES = {
    FLASH[0]: Package("flash_attn", "flash-attn", "'pytest-llmperf[flash-attn]'", preload="flash_attention_2"),
    FLASH[1]: Package("flash_attn_interface", "flash-attn-3", "flash-attn-3 (or build flash-attention's hopper/)"),
}
# What the operators of each attention are called; eager's are matrix products and a softmax, like anything else's.
_MATH = "aten._scaled_dot_product_attention_math.default"
_KERNELS: Mapping[str, Callable[[str], bool]] = {
    "eager": lambda kernel: not kernel,
    "sdpa": lambda kernel: "scaled_dot_product" in kernel and kernel != _MATH,
    FLASH[0]: lambda kernel: "flash_attn" in kernel and "flash_attn_3" not in kernel,
    FLASH[1]: lambda kernel: "flash_attn_3" in kernel,
    "flex_attention": lambda kernel: "flex_attention" in kernel,
}

_TURNED_OFF = (
    "this environment turns its fused kernels off (torch.backends.cuda.enable_flash_sdp, ...); "
    "use sdpa_backend='math' if that is meant"
)
_FELL_BACK = (
    "PyTorch fell back to its math kernel: no fused one took these inputs "
    "(torch.backends.cuda.can_use_flash_attention(..., debug=True) says why)"
)

UNKNOWN = "unknown"


def _clash(spec: TrainSpec) -> str | None:
    backend = spec.sdpa_backend
    if not has_fp32(spec) and not is_16_bit(spec):
        return f"{spec.attention} has no fp32 kernels; use bf16 or fp16, or attention='sdpa'"
    if backend != "auto" and spec.attention != "sdpa":
        return f"sdpa_backend={backend!r} acts on attention='sdpa', and this is {spec.attention}"
    if backend == "flash" and spec.rows != "packed":
        return f"sdpa's flash kernel takes no mask, and rows={spec.rows!r} have one; use another, or rows='packed'"
    heads = spec.architecture.geometry if backend == "efficient" else None
    if heads and heads.num_key_value_heads != heads.num_heads:
        return "sdpa's efficient kernel takes no shared key-value heads, and this model has them; use another backend"
    if backend in ("flash", "cudnn") and not is_16_bit(spec):
        return f"sdpa's {backend} kernel takes no fp32; use bf16 or fp16, or sdpa_backend='auto'"
    return None


def _why_not_on_cpu(spec: TrainSpec) -> str | None:
    if spec.attention in (*FLASH, "flex_attention"):
        return f"{spec.attention} trains on a GPU only"
    return f"sdpa's {spec.sdpa_backend} kernel is a GPU's" if spec.sdpa_backend in ("efficient", "cudnn") else None


def has_fp32(spec: TrainSpec) -> bool:
    return spec.attention not in FLASH


def _in_fp32(spec: TrainSpec) -> Mapping[str, Any]:
    """By a kernel that has fp32 where its own has none."""
    backend = "auto" if spec.sdpa_backend in ("flash", "cudnn") else spec.sdpa_backend
    return {"attention": spec.attention if has_fp32(spec) else "sdpa", "sdpa_backend": backend}


def _axis(base: TrainSpec, search: Search) -> Axis:
    choices = {}
    # Few have the last one's package; who asks for it keeps it.
    there = ATTENTIONS[:2] if search.on_cpu else ATTENTIONS[:-1]
    for attention in dict.fromkeys([*there, base.attention]):
        choices[attention] = {"attention": attention, "sdpa_backend": "auto"}
        for one in SDPA_BACKENDS[1:-1] if attention == "sdpa" and not search.on_cpu else ():
            choices[f"sdpa {one}"] = {"attention": attention, "sdpa_backend": one}
    return Axis.of("attention", choices)


@dataclass(frozen=True)
class AttentionEvidence:
    attention: str | None = None
    """The implementation that the model's configuration names."""
    attention_kernel: str | None = None
    """The operators that one more sequence called; empty: plain matrix products. Not every kernel can be watched."""

    @property
    def kernel(self) -> str:
        return UNKNOWN if self.attention_kernel is None else self.attention_kernel


def _attention(spec: TrainSpec, evidence: Evidence) -> str | None:
    asked, ran = spec.attention, claimed(evidence.attention.attention, "attention")
    kernel = evidence.attention.kernel
    if asked != ran:
        return f"asked for attention {asked}, the model ran {ran}"
    if kernel == UNKNOWN:
        return None
    if spec.sdpa_backend != "auto":
        ran = "math" if kernel in ("", _MATH) else kernel
        return None if spec.sdpa_backend in ran else f"asked for sdpa's {spec.sdpa_backend} kernel, the run had {ran}"
    if _KERNELS[asked](kernel):
        return None
    if asked == "sdpa" and kernel in ("", _MATH):
        # On a CPU it may be the only one there is; on a GPU it is what sdpa is there to avoid.
        is_off = evidence.run.torch.get("sdpa_kernels") == ["math"]
        line = f"asked for attention sdpa, {_TURNED_OFF if is_off else _FELL_BACK}"
        return line if evidence.run.is_on_gpu else None
    return f"asked for attention {asked}, the operators that ran were {kernel or 'plain matrix products'}"


def _lost(spec: TrainSpec, launches: Sequence[Evidence], reference: Sequence[Evidence]) -> str | None:
    """A line where the fused attention that ``reference`` ran, the newest last, is gone. On a GPU a launch's evidence
    alone makes that invalid; a CPU's baseline must have had one. One asked for by name is the check's to look at."""
    kernels = (each.attention.kernel for each in reversed(reference))
    had = next((kernel for kernel in kernels if _is_fused(kernel)), None)
    for launch in launches if had and spec.sdpa_backend == "auto" else ():
        now = launch.attention.kernel
        if launch.attention.attention == "sdpa" and now != UNKNOWN and not _is_fused(now):
            return (
                f"asked for attention sdpa, its fused kernel was lost: {had} -> {now or 'plain matrix products'} "
                "(if that is meant, remove the baseline and record it anew)"
            )
    return None


def _is_fused(kernel: str) -> bool:
    return "attention" in kernel and "attention_math" not in kernel


SETTING = Setting(
    name="attention",
    fields=("attention", "sdpa_backend"),
    values={"attention": ATTENTIONS, "sdpa_backend": SDPA_BACKENDS},
    in_id={"attention": lambda spec: spec.attention, "sdpa_backend": "{}"},
    clash=_clash,
    why_not_on_cpu=_why_not_on_cpu,
    needs=lambda spec: _PACKAGES.get(spec.attention),
    plain=lambda _: {"attention": "eager", "sdpa_backend": "auto"},
    in_fp32=_in_fp32,
    axis=_axis,
    evidence=AttentionEvidence,
    checks={"attention": _attention},
    lost=_lost,
)

# Experts of a mixture, by transformers' words; ``auto``: its own choice.
_EXPERTS = ("auto", "eager", "batched_mm", "grouped_mm")
# What the operators are called that multiply by their weights; eager's are plain products, one after the other.
_PRODUCTS: Mapping[str, str] = {"batched_mm": "bmm", "grouped_mm": "_grouped_mm"}


def has_experts(spec: TrainSpec) -> bool:
    return any("expert" in name and value for name, value in spec.architecture.config.items())


def _experts_clash(spec: TrainSpec) -> str | None:
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
        seen = {name for name, mark in _PRODUCTS.items() if f".{mark}." in kernel} or {"eager"}
        return kernel == "unknown" or seen == {experts}


def _experts(spec: TrainSpec, evidence: Evidence) -> str | None:
    if spec.experts == "auto":
        return None
    seen = evidence.experts
    line = equal("experts", spec.experts, claimed(seen.experts, "experts") or "another implementation")
    if line or seen.runs(spec.experts):
        return line
    return f"asked for experts {spec.experts}, the operators that ran were {seen.experts_kernel}"


def _experts_lost(spec: TrainSpec, launches: Sequence[Evidence], reference: Sequence[Evidence]) -> str | None:
    """A line where transformers' own choice was grouped products in ``reference``, and is that no more."""
    had = any("_grouped_mm" in (each.experts.experts_kernel or "") for each in reference)
    now = (each.experts.experts_kernel for each in launches if not each.experts.runs("grouped_mm"))
    kernel = next(now, None) if had and spec.experts == "auto" else None
    return kernel and (
        f"its experts' grouped products were lost: they ran by {kernel} "
        "(if that is meant, remove the baseline and record it anew)"
    )


EXPERTS = Setting(
    name="experts",
    fields=("experts",),
    values={"experts": _EXPERTS},
    # Eager is attention's word, too.
    in_id={"experts": lambda spec: {"auto": "", "eager": "experts-loop"}.get(spec.experts, f"experts-{spec.experts}")},
    clash=_experts_clash,
    plain=lambda _: {"experts": "auto"},
    axis=lambda base, _: Axis.over("experts", _EXPERTS) if has_experts(base) else None,
    evidence=ExpertsEvidence,
    checks={"experts": _experts},
    lost=_experts_lost,
)
