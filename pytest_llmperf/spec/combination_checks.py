"""What of a TrainSpec cannot work together, and why: known before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_llmperf.spec.choices import LIGER_KERNELS

if TYPE_CHECKING:
    from pytest_llmperf.spec.train_spec import TrainSpec

# fp8 matrix units take operands in rows of 16 bytes.
_FP8_MULTIPLE = 16
_HYBRID_LEAST = 4


def problem(spec: TrainSpec) -> str | None:
    """Why these settings cannot train together and what to do instead, in one line; ``None`` where they can."""
    return next((line for rule in _RULES if (line := rule(spec))), None)


def _precisions(spec: TrainSpec) -> str | None:
    weights, autocast = spec.model_precision, spec.mixed_precision
    if autocast == weights == "fp16":
        return "fp16 weights with fp16 mixed precision: the gradient scaler refuses fp16 gradients; use fp32 weights"
    if {weights, autocast} == {"bf16", "fp16"}:
        return f"{weights} weights under {autocast} mixed precision; use one 16-bit type"
    if spec.tf32 and weights != "fp32":
        return f"tf32 acts on fp32 matrix products, and {spec.precision} has none; leave tf32=False"
    return None


def _attentions(spec: TrainSpec) -> str | None:
    if spec.attention == "flash_attention_2" and not _is_16_bit(spec):
        return "flash_attention_2 has no fp32 kernels; use bf16 or fp16, or attention='sdpa'"
    if spec.sdpa_backend != "auto" and spec.attention != "sdpa":
        return f"sdpa_backend={spec.sdpa_backend!r} acts on attention='sdpa', and this is {spec.attention}"
    if spec.sdpa_backend == "flash" and spec.has_padding:
        return (
            f"sdpa's flash kernel takes no mask, and rows={spec.rows!r} have one; use another backend, or rows='packed'"
        )
    heads = spec.architecture.geometry
    if spec.sdpa_backend == "efficient" and heads and heads.num_key_value_heads != heads.num_heads:
        return "sdpa's efficient kernel takes no shared key-value heads, and this model has them; use another backend"
    if spec.sdpa_backend in ("flash", "cudnn") and not _is_16_bit(spec):
        return f"sdpa's {spec.sdpa_backend} kernel takes no fp32; use bf16 or fp16, or sdpa_backend='auto'"
    return None


def _kernels(spec: TrainSpec) -> str | None:
    if spec.liger_kernels == "all":
        return None
    words = spec.liger_kernels.split("+")
    if not spec.liger:
        return f"liger_kernels={spec.liger_kernels!r} without liger=True changes nothing"
    unknown = [word for word in words if word not in LIGER_KERNELS]
    if unknown:
        return f"unknown Liger kernel {unknown[0]!r}; known: {', '.join(LIGER_KERNELS)}, joined by '+'"
    ordered = "+".join(name for name in LIGER_KERNELS if name in words)
    if ordered != spec.liger_kernels:
        return f"liger_kernels={spec.liger_kernels!r} must name each kernel once, in Liger's order: {ordered!r}"
    if "cross_entropy" in words and "fused_linear_cross_entropy" in words:
        return "Liger's cross_entropy and fused_linear_cross_entropy replace the same; name one of them"
    return None


def _modes(spec: TrainSpec) -> str | None:
    for name, default in (("torch_compile_mode", "default"), ("torch_compile_scope", "model")):
        if getattr(spec, name) != default and not spec.torch_compile:
            return f"{name}={getattr(spec, name)!r} without torch_compile=True changes nothing"
    if spec.checkpointing_policy != "full" and not spec.gradient_checkpointing:
        return f"checkpointing_policy={spec.checkpointing_policy!r} without gradient_checkpointing=True changes nothing"
    if spec.checkpointing_policy == "selective" and spec.attention == "flex_attention":
        return (
            "selective recomputation cannot keep what flex_attention gave; use another attention, or the policy 'full'"
        )
    if spec.checkpointing_policy == "selective" and spec.liger and "rope" in _kernels_of(spec):
        return (
            "Liger's rope kernel writes over the products that selective recomputation has kept, so that gradients are "
            "wrong and nothing says so; name the others in liger_kernels (a Llama has rms_norm, swiglu and "
            "fused_linear_cross_entropy), or use checkpointing_policy='full'"
        )
    return None


def _kernels_of(spec: TrainSpec) -> str:
    return "+".join(LIGER_KERNELS) if spec.liger_kernels == "all" else spec.liger_kernels


def _fp8(spec: TrainSpec) -> str | None:
    if spec.fp8 == "no":
        return None
    if "bf16" not in (spec.model_precision, spec.mixed_precision):
        return "fp8 products are made from bf16 ones; use bf16 weights or bf16 mixed precision"
    tokens = spec.micro_batch_size * spec.sequence_length
    if tokens % _FP8_MULTIPLE:
        return f"fp8 products need tokens in multiples of {_FP8_MULTIPLE}, and a micro-batch has {tokens}"
    return None


def _sharding(spec: TrainSpec) -> str | None:
    if spec.parallelism == "ddp":
        return None
    if spec.gpus == 1:
        return f"parallelism={spec.parallelism!r} has nothing to shard over on one GPU; use parallelism='ddp'"
    if spec.mixed_precision != "no" and spec.model_precision != "fp32":
        return (
            f"{spec.parallelism} under mixed precision keeps fp32 weights whatever was asked for (accelerate raises "
            "them); use fp32 weights (precision bf16-mixed), or no mixed precision (bf16-pure)"
        )
    if spec.mixed_precision == "fp16":
        return f"{spec.parallelism} with fp16 loss scaling was never tried here; use bf16"
    if spec.parallelism == "fsdp_hybrid" and (spec.gpus < _HYBRID_LEAST or spec.gpus % 2):
        return (
            f"fsdp_hybrid needs shards and replicas, so an even number of GPUs from {_HYBRID_LEAST} on, not {spec.gpus}"
        )
    return None


def _inputs(spec: TrainSpec) -> str | None:
    if spec.data_prefetch is not None and not spec.data_workers:
        return f"data_prefetch={spec.data_prefetch} without data_workers changes nothing: only workers fetch ahead"
    if spec.tokenise == "on_the_fly" and not spec.has_padding:
        return (
            "packed rows are cut from the tokens of all documents, so none can be made on the fly; use rows='padded' "
            "or 'padded_in_loss', or tokenise='ahead'"
        )
    return None


def _is_16_bit(spec: TrainSpec) -> bool:
    return bool({spec.model_precision, spec.mixed_precision} & {"bf16", "fp16"})


_RULES: tuple[Callable[[TrainSpec], str | None], ...] = (
    _precisions,
    _attentions,
    _kernels,
    _modes,
    _fp8,
    _sharding,
    _inputs,
)
