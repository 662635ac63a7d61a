"""Liger: its kernels in the place of a model's own, all of them or a choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.settings.setting import Axis, Evidence, Package, Search, Setting, TrainSpec, at_default, claimed
from pytest_llmperf.support.files import shipped

#: What Liger's patches can be told to replace, by its own words.
LIGER_KERNELS = tuple("rope rms_norm layer_norm swiglu geglu cross_entropy fused_linear_cross_entropy".split())

# By what a family's feed-forward layers are made of, as Liger's own patches have them.
_GATED_BY_SILU = (
    "llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe olmo2 phi3 granite smollm3 glm4 internlm3".split()
)
_GATED_BY_GELU = "gemma gemma2 gemma3_text".split()
#: Of the two losses that Liger has, the one that saves the most memory.
LOSS = "fused_linear_cross_entropy"


def liger_kernels(spec: TrainSpec) -> tuple[str, ...]:
    """Those that ``liger_kernels="all"`` stands for, in Liger's order; none where that is not known of the family."""
    family = spec.architecture.config["model_type"]
    gate = "swiglu" if family in _GATED_BY_SILU else "geglu" if family in _GATED_BY_GELU else ""
    chosen = {"rope", "rms_norm", gate, LOSS} if gate else set[str]()
    return tuple(kernel for kernel in LIGER_KERNELS if kernel in chosen)


def _clash(spec: TrainSpec) -> str | None:
    if spec.liger_kernels == "all":
        return None
    words = spec.liger_kernels.split("+")
    if unknown := [word for word in words if word not in LIGER_KERNELS]:
        return f"unknown Liger kernel {unknown[0]!r}; known: {', '.join(LIGER_KERNELS)}, joined by '+'"
    ordered = "+".join(name for name in LIGER_KERNELS if name in words)
    if ordered != spec.liger_kernels:
        return f"liger_kernels={spec.liger_kernels!r} must name each kernel once, in Liger's order: {ordered!r}"
    if "cross_entropy" in words and LOSS in words:
        return "Liger's cross_entropy and fused_linear_cross_entropy replace the same; name one of them"
    return None


def _axis(base: TrainSpec, search: Search) -> Axis | None:
    """Off, all of them, all but each one, and the loss alone, which saves the most memory."""
    if search.on_cpu:
        return None
    kernels = liger_kernels(base)
    chosen = {"all": "all"}
    for without in kernels:
        chosen[f"without {without}"] = "+".join(kernel for kernel in kernels if kernel != without)
    if kernels:
        chosen[f"{LOSS} alone"] = LOSS
    on = {name: {"liger": True, "liger_kernels": each} for name, each in chosen.items()}
    return Axis.of("liger", {"off": {"liger": False, "liger_kernels": "all"}, **on})


_LIGER = Package("liger_kernel", "Liger", "'pytest-llmperf[liger]'", preload="liger")


@dataclass(frozen=True)
class LigerEvidence:
    liger_modules: int | None = None
    """Modules whose forward pass is one of Liger's."""
    liger_forwards: Sequence[str] | None = None
    """The names of those forward passes, each once."""
    liger_functions: Sequence[str] | None = None
    """Functions that it replaced, which no module shows; old records do not tell."""
    liger_note: str = ""
    """What Liger said when it patched nothing."""


# How the name of the forward pass of each begins or goes on, in small letters; a Gemma 3's loss has a name of its own.
_MARKS = dict(shipped(__file__, "marks.ini")["kernels"])


def _liger(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = evidence.liger
    patched = claimed(seen.liger_modules, "liger_modules") + len(seen.liger_functions or ())
    if spec.liger and not patched:
        return "asked for liger, nothing was patched" + (f" ({seen.liger_note})" if seen.liger_note else "")
    if patched and not spec.liger:
        return f"liger was not asked for, and {patched} modules were patched"
    if spec.liger_kernels == "all":
        return None
    forwards = " ".join(claimed(seen.liger_forwards, "liger_forwards")).lower()
    functions = claimed(seen.liger_functions, "liger_functions")
    ran = {kernel for mark, kernel in _MARKS.items() if mark in forwards} | {*functions}
    if ran == {*spec.liger_kernels.split("+")}:
        return None
    told = "+".join(name for name in LIGER_KERNELS if name in ran)
    return f"asked for the Liger kernels {spec.liger_kernels}, the run had {told or 'none'}"


SETTING = Setting(
    name="liger",
    fields=("liger", "liger_kernels"),
    in_id={"liger": "liger", "liger_kernels": "{}"},
    switch="liger",
    switched=("liger_kernels",),
    clash=_clash,
    why_not_on_cpu=lambda spec: "Liger's Triton kernels need a GPU" if spec.liger else None,
    needs=lambda spec: _LIGER if spec.liger else None,
    plain=at_default("liger", "liger_kernels"),
    axis=_axis,
    evidence=LigerEvidence,
    checks={"liger": _liger},
)
