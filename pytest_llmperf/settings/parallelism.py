"""Parallelism: over how many ranks a training is spread, and how they share its weights; and its narrower forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.settings.precision import PRECISIONS, is_16_bit
from pytest_llmperf.settings.setting import (
    Axis,
    Evidence,
    Package,
    Search,
    Setting,
    TrainSpec,
    at_default,
    claimed,
    equal,
)

#: ``fsdp`` shards over all ranks; ``fsdp_hybrid`` over those of a node (in one node: over half), and has replicas. By
#: ``tensor`` all ranks compute each sequence together, by the plan that transformers has of the model's layers; by
#: ``context`` each has a part of every sequence, and a shard of the weights. ``zero2``, ``zero3``: DeepSpeed's stages.
#: ``sequence``: each has a part of every sequence, for attention a part of the heads, by DeepSpeed's Ulysses, whose
#: stage 3 shares the weights.
PARALLELISMS = ("ddp", "fsdp", "fsdp_hybrid", "tensor", "context", "zero2", "zero3", "sequence")
#: Those of a search: the others have needs that it does not know.
_SEARCHED = PARALLELISMS[:3]

_HYBRID_LEAST = 4
# Ranks that are enough to share; shards with replicas take more.
_FEW = 2

# Those that update each weight by itself: what ranks share, and what DeepSpeed lays flat.
_OF_DEEPSPEED = ("zero2", "zero3", "sequence")
_ONE_BY_ONE: Mapping[str, tuple[str, ...]] = {
    "tensor": ("adamw_torch", "sgd"),
    **dict.fromkeys(_OF_DEEPSPEED, ("adamw_torch", "adamw_torch_fused", "sgd")),
}
_DEEPSPEED = Package("deepspeed", "DeepSpeed", "'pytest-llmperf[deepspeed]'")


def few_ranks(spec: TrainSpec) -> int:
    """As few of its ranks as show that they share a step."""
    return min(spec.gpus, _HYBRID_LEAST if spec.parallelism == "fsdp_hybrid" else _FEW)


def data_ranks(spec: TrainSpec) -> int:
    """How many of its ranks read sequences of their own."""
    return 1 if spec.parallelism in ("tensor", "context", "sequence") else spec.gpus


def is_context(spec: TrainSpec) -> bool:
    return spec.parallelism == "context"


def zero_stage(spec: TrainSpec) -> int:
    """DeepSpeed's; 0: it does not train."""
    return {"zero2": 2, "zero3": 3, "sequence": 3}.get(spec.parallelism, 0)


def is_sharded(spec: TrainSpec) -> bool:
    return spec.parallelism != "ddp"


def gathered_precision(spec: TrainSpec) -> str:
    """Of the copies of fp32 weights that FSDP and DeepSpeed compute with in the place of autocast; ``no``: of none."""
    return "no" if spec.parallelism in ("ddp", "tensor") else spec.mixed_precision


def on_fewer(wide: TrainSpec, gpus: int) -> TrainSpec | None:
    """The same work for each of so many; one has nothing to share, and DDP's figure serves every parallelism."""
    try:
        return replace(wide, gpus=gpus, parallelism="ddp" if gpus == 1 else wide.parallelism)
    except ValueError:  # a parallelism that takes more GPUs than these
        return None


def _clash(spec: TrainSpec) -> str | None:
    if not is_sharded(spec):
        return None
    if spec.gpus == 1:
        return f"parallelism={spec.parallelism!r} has nothing to shard over on one GPU; use parallelism='ddp'"
    untried = [(name, getattr(spec, name)) for name in _UNTRIED.get(spec.parallelism, ())]
    if name := next((name for name, value in untried if value not in (False, "no", "model")), ""):
        return f"{spec.parallelism} with {name} was never tried here; leave {name} out"
    optimizers = _ONE_BY_ONE.get(spec.parallelism, (spec.optimizer,))
    if spec.optimizer not in optimizers:
        names = " or ".join(map(repr, optimizers))
        return f"{spec.parallelism} with {spec.optimizer} does not train: use optimizer={names}"
    if spec.parallelism == "tensor":
        is_scaled = spec.mixed_precision == "fp16"
        return _heads_clash(spec) or ("tensor with fp16 loss scaling does not train: use bf16" if is_scaled else None)
    of_parts = {"context": _context_clash, "sequence": _sequence_clash}.get(spec.parallelism)
    return _fsdp_clash(spec) or (of_parts(spec) if of_parts else None)


_NEVER = ("fp8", "lora")
_UNTRIED: Mapping[str, tuple[str, ...]] = {
    "tensor": _NEVER,
    "context": (*_NEVER, "torch_compile", "loss"),
    **dict.fromkeys(_OF_DEEPSPEED, (*_NEVER, "torch_compile")),
}


def _fsdp_clash(spec: TrainSpec) -> str | None:
    if zero_stage(spec) and spec.model_precision != "fp32":
        return f"{spec.parallelism} keeps fp32 weights whatever was asked for; use model_precision='fp32'"
    if spec.mixed_precision != "no" and spec.model_precision != "fp32":
        return (
            f"{spec.parallelism} under mixed precision keeps fp32 weights whatever was asked for (accelerate raises "
            "them); use model_precision='fp32', or mixed_precision='no'"
        )
    if spec.mixed_precision == "fp16":
        return f"{spec.parallelism} with fp16 loss scaling was never tried here; use bf16"
    if spec.parallelism == "fsdp_hybrid" and (spec.gpus < _HYBRID_LEAST or spec.gpus % 2):
        return (
            f"fsdp_hybrid needs shards and replicas, so an even number of GPUs from {_HYBRID_LEAST} on, not {spec.gpus}"
        )
    return None


def _heads_clash(spec: TrainSpec) -> str | None:
    sizes = spec.architecture.geometry
    heads = (sizes.num_heads, sizes.num_key_value_heads) if sizes else ()
    if any(each % spec.gpus for each in heads):
        shares = f"{spec.parallelism} shares attention's heads"
        return f"{shares}: {spec.gpus} GPUs do not divide {' and '.join(map(str, heads))}"
    return None


def _sequence_clash(spec: TrainSpec) -> str | None:
    if spec.attention not in ("sdpa", "flash_attention_2"):
        return f"sequence was tried with sdpa and flash_attention_2, not with {spec.attention}: use one of them"
    if spec.data == "text" and spec.rows != "packed":
        return f"sequence divides rows that are alike, and rows={spec.rows!r} are not; use rows='packed'"
    if spec.sequence_length % spec.gpus:
        return f"sequence gives each rank a part of a sequence: {spec.gpus} do not divide {spec.sequence_length}"
    if spec.gradient_accumulation_steps % spec.gpus:
        passes = f"a multiple of {spec.gpus} gradient_accumulation_steps, not {spec.gradient_accumulation_steps}"
        return f"sequence gathers data for {spec.gpus} passes at once, and steps are alike; expected {passes}"
    return _heads_clash(spec)


def _context_clash(spec: TrainSpec) -> str | None:
    if spec.attention != "sdpa" or spec.sdpa_backend == "math":
        return f"context passes keys and values on from rank to rank by sdpa's fused kernels, not by {spec.attention}"
    if spec.data == "text" and spec.rows != "packed":
        return f"context takes no mask, and rows={spec.rows!r} have one or come with positions; use rows='packed'"
    sizes = spec.architecture.geometry
    if not is_16_bit(spec) and sizes and sizes.num_key_value_heads != sizes.num_heads:
        return "context takes fused kernels, and sdpa has none of fp32 for shared key-value heads: use bf16"
    # Each rank has a part from the front and one from the back, so that causal attention is as much work for all.
    if spec.sequence_length % (2 * spec.gpus):
        return f"context gives each rank two parts of a sequence: {2 * spec.gpus} do not divide {spec.sequence_length}"
    return None


def _why_not_on_cpu(spec: TrainSpec) -> str | None:
    if is_context(spec):
        return "its attention's kernels are a GPU's"
    # accelerate would train with DDP there, and say nothing.
    return "accelerate shards over GPUs only" if is_sharded(spec) and not zero_stage(spec) else None


def _axis(base: TrainSpec, search: Search) -> Axis:
    found = []
    for parallelism in _SEARCHED[:1] if search.on_cpu or base.gpus == 1 else _SEARCHED:
        try:
            replace(base, parallelism=parallelism, model_precision="fp32", mixed_precision="bf16")
        except ValueError:  # more GPUs than there are
            continue
        found.append(parallelism)
    if base.mixed_precision == "no" or {"model_precision"} & search.fixed or {*PRECISIONS, "fp8"} & {*search.allowed}:
        return Axis.over("parallelism", found)
    # What shards keeps fp32 weights under mixed precision: they come with it, where precision is no axis of its own.
    weights = {one: base.model_precision if one == "ddp" else "fp32" for one in found}
    return Axis.of("parallelism", {one: {"parallelism": one, "model_precision": weights[one]} for one in found})


@dataclass(frozen=True)
class ParallelismEvidence:
    world_size: int | None = None
    parallelism: str = "ddp"
    """Older records knew no other; ``none``: of one rank alone."""
    mesh: Sequence[int] | None = None
    """Sizes of the mesh that the weights are sharded over."""
    gathered_dtype: str | None = None
    """Of the copies of its weights that FSDP or DeepSpeed computes with; empty: there are none."""


def _world_size(spec: TrainSpec, evidence: Evidence) -> str | None:
    return equal("world size", spec.gpus, claimed(evidence.parallelism.world_size, "world_size"))


def _parallelism(spec: TrainSpec, evidence: Evidence) -> str | None:
    return None if spec.gpus == 1 else equal("parallelism", spec.parallelism, evidence.parallelism.parallelism)


SETTING = Setting(
    name="parallelism",
    fields=("gpus", "parallelism"),
    values={"parallelism": PARALLELISMS},
    in_id={"parallelism": "{}"},
    least={"gpus": 1},
    clash=_clash,
    why_not_on_cpu=_why_not_on_cpu,
    needs=lambda spec: _DEEPSPEED if zero_stage(spec) else None,
    small=lambda spec: {"gpus": few_ranks(spec)},
    plain=at_default("gpus", "parallelism"),
    # Shards of weights alone: a fused kernel need not have fp32.
    in_fp32=lambda spec: {"parallelism": "fsdp"} if is_context(spec) else {},
    axis=_axis,
    evidence=ParallelismEvidence,
    checks={"gpus": _world_size, "parallelism": _parallelism},
)
