"""Precision: the types of weights and of products, TF32 and fp8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_llmperf.settings.setting import (
    Axis,
    Evidence,
    Package,
    Search,
    Setting,
    SpecError,
    TrainSpec,
    claimed,
    equal,
    is_refusal,
)
from pytest_llmperf.support.user_input import hint

__tracebackhide__ = is_refusal
#: torchao's recipe by which FSDP gathers weights in float8, half the bytes of bf16: each has one scale.
GATHERED = "tensorwise_all_gather"
#: Its recipes for the products of linear layers; ``no`` leaves them in the compute precision.
FP8_RECIPES = ("no", "tensorwise", "rowwise", "rowwise_with_gw_hp", GATHERED)

#: One word for the pair (model_precision, mixed_precision) and TF32, the chapter's steps first.
PRECISIONS: Mapping[str, tuple[str, str, bool]] = {
    "fp32": ("fp32", "no", False),
    "tf32": ("fp32", "no", True),
    "bf16-mixed": ("fp32", "bf16", False),
    "bf16": ("bf16", "bf16", False),
    "bf16-pure": ("bf16", "no", False),
    "fp16-mixed": ("fp32", "fp16", False),
    "fp16-pure": ("fp16", "no", False),
}

_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
#: fp8 matrix units take operands in rows of 16 bytes.
FP8_MULTIPLE = 16


def precision_fields(word: object) -> dict[str, Any]:
    """The three fields of a TrainSpec that a ``word`` of ``PRECISIONS`` stands for; ``SpecError``: no such word."""
    if not isinstance(word, str) or word not in PRECISIONS:  # a test may be parametrized with a list
        known = tuple(PRECISIONS)
        raise SpecError(f"unknown precision {word!r}{hint(str(word), known)}; known: {', '.join(known)}")
    return dict(zip(("model_precision", "mixed_precision", "tf32"), PRECISIONS[word], strict=True))


def precision_of(spec: TrainSpec) -> str:
    """The one word for its precision; a combination without a word of its own is spelled out."""
    words = {fields: word for word, fields in PRECISIONS.items()}
    spelled = f"{spec.model_precision}-amp-{spec.mixed_precision}" + ("-tf32" if spec.tf32 else "")
    return words.get((spec.model_precision, spec.mixed_precision, spec.tf32), spelled)


def bytes_each(spec: TrainSpec) -> int:
    """Of an element of its weights."""
    return 4 if spec.model_precision == "fp32" else 2


def is_16_bit(spec: TrainSpec) -> bool:
    """Whether its attention computes in 16 bits."""
    return bool({spec.model_precision, spec.mixed_precision} & {"bf16", "fp16"})


def _clash(spec: TrainSpec) -> str | None:
    weights, autocast = spec.model_precision, spec.mixed_precision
    if autocast == weights == "fp16":
        return "fp16 weights with fp16 mixed precision: the gradient scaler refuses fp16 gradients; use fp32 weights"
    if {weights, autocast} == {"bf16", "fp16"}:
        return f"{weights} weights under {autocast} mixed precision; use one 16-bit type"
    if spec.tf32 and weights != "fp32":
        return f"tf32 acts on fp32 matrix products, and {spec.precision} has none; leave tf32=False"
    return None if spec.fp8 == "no" else _fp8_clash(spec)


def _fp8_clash(spec: TrainSpec) -> str | None:
    tokens = spec.micro_batch_size * spec.sequence_length
    if "bf16" not in (spec.model_precision, spec.mixed_precision):
        return "fp8 products are made from bf16 ones; use bf16 weights or bf16 mixed precision"
    if tokens % FP8_MULTIPLE:
        return f"fp8 products need tokens in multiples of {FP8_MULTIPLE}, and a micro-batch has {tokens}"
    if spec.fp8 == GATHERED and spec.parallelism not in ("fsdp", "fsdp_hybrid"):
        return f"fp8={GATHERED!r} is of weights that FSDP gathers: use parallelism='fsdp', or fp8={FP8_RECIPES[1]!r}"
    return None


def _why_not_on_cpu(spec: TrainSpec) -> str | None:
    if "fp16" in (spec.mixed_precision, spec.model_precision):
        return "fp16 training needs a GPU"
    if spec.fp8 != "no":
        return "fp8 products need a GPU's matrix units (Ada, Hopper or newer)"
    return "TF32 is a mode of the GPU's matrix units" if spec.tf32 else None


_TORCHAO = Package("torchao", "torchao", "'pytest-llmperf[fp8]'", preload="fp8")


def _axis(base: TrainSpec, search: Search) -> Axis:
    own = {name: getattr(base, name) for name in ("model_precision", "mixed_precision", "tf32")}
    choices = {base.precision: {**own, "fp8": base.fp8}}
    for word in search.allowed:
        if word in PRECISIONS and word != base.precision:
            choices[word] = {**precision_fields(word), "fp8": "no"}
        for recipe in FP8_RECIPES if word == "fp8" else ():
            choices |= {} if recipe in ("no", base.fp8, GATHERED) else {f"fp8 {recipe}": {**own, "fp8": recipe}}
    return Axis.of("precision", choices)


@dataclass(frozen=True)
class PrecisionEvidence:
    """Types as they were while it trained, as torch spells them."""

    parameter_dtypes: Mapping[str, int] | None = None
    """Elements by type, before anything wrapped the model."""
    kept_dtypes: Mapping[str, int] = field(default_factory=dict)
    """Those of them that the model's own class keeps in another type than asked for, as fp32 routers."""
    autocast_dtype: str | None = field(default=None, metadata={"null": ""})
    """Empty: no autocast."""
    tf32: bool | None = None
    fp8_modules: int = 0
    """Linear layers that multiply in fp8; older records have none, and no fp8."""
    linear_modules: int = 0
    """Those that do not."""
    fp8_recipe: str | None = None
    fp8_gathered: int | None = None
    """Those whose weights FSDP gathered in float8; nothing where none is in fp8."""
    loss_scaling: bool | None = None


def _weights(spec: TrainSpec, evidence: Evidence) -> str | None:
    kept = evidence.precision.kept_dtypes
    parameters = claimed(evidence.precision.parameter_dtypes, "parameter_dtypes")
    seen = [dtype for dtype, number in sorted(parameters.items()) if number > kept.get(dtype, 0)]
    return equal("weights of", _DTYPES[spec.model_precision], ", ".join(seen))


def _autocast(spec: TrainSpec, evidence: Evidence) -> str | None:
    # FSDP casts the weights of each layer as it gathers them, in the place of autocast.
    seen = claimed(evidence.precision.autocast_dtype, "autocast_dtype") or evidence.parallelism.gathered_dtype
    if spec.mixed_precision == "no":
        return f"asked for no autocast, the run had autocast to {seen}" if seen else None
    return equal("autocast to", _DTYPES[spec.mixed_precision], seen or "none")


def _fp8(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = evidence.precision
    if spec.fp8 == "no":
        return f"fp8 was not asked for, and {seen.fp8_modules} modules had it" if seen.fp8_modules else None
    if not seen.fp8_modules:
        return "asked for fp8, no linear layer was converted"
    left, converted = seen.linear_modules, seen.fp8_modules
    if left > converted:
        return f"asked for fp8, {left} linear layers were left as they were and {converted} converted"
    if line := equal("fp8's recipe", spec.fp8, spec.fp8 if seen.fp8_recipe is None else seen.fp8_recipe):
        return line
    return equal("weights gathered in fp8:", converted if spec.fp8 == GATHERED else 0, seen.fp8_gathered or 0)


SETTING = Setting(
    name="precision",
    fields=("model_precision", "mixed_precision", "tf32", "fp8"),
    values={"model_precision": ("fp32", "bf16", "fp16"), "mixed_precision": ("no", "bf16", "fp16"), "fp8": FP8_RECIPES},
    in_id={"model_precision": precision_of, "fp8": "fp8-{}"},
    clash=_clash,
    why_not_on_cpu=_why_not_on_cpu,
    needs=lambda spec: _TORCHAO if spec.fp8 != "no" else None,
    plain=lambda spec: {"fp8": FP8_RECIPES[1]} if spec.fp8 == GATHERED else {},
    in_fp32=lambda _: {**precision_fields("fp32"), "fp8": "no"},
    axis=_axis,
    evidence=PrecisionEvidence,
    checks={"model_precision": _weights, "mixed_precision": _autocast, "tf32": "tf32", "fp8": _fp8},
)
