"""Parallelism: over how many ranks a training is spread, and how they share its weights; and its narrower forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.settings.setting import Axis, Evidence, Search, Setting, TrainSpec, at_default, claimed, equal

#: ``fsdp`` shards over all ranks; ``fsdp_hybrid`` over those of a node (in one node: over half), and has replicas. By
#: ``tensor`` all ranks compute each sequence together, by the plan that transformers has of the model's layers.
PARALLELISMS = ("ddp", "fsdp", "fsdp_hybrid", "tensor")

_HYBRID_LEAST = 4
# Ranks that are enough to share, and to have shards with replicas.
_FEW: Mapping[str, int] = {"ddp": 2, "fsdp": 2, "fsdp_hybrid": 4, "tensor": 2}


# Those that update each weight by itself where ranks share it.
_ONE_BY_ONE = ("adamw_torch", "sgd")


def few_ranks(spec: TrainSpec) -> int:
    """As few of its ranks as show that they share a step."""
    return min(spec.gpus, _FEW[spec.parallelism])


def data_ranks(spec: TrainSpec) -> int:
    """How many of its ranks read sequences of their own."""
    return 1 if spec.parallelism == "tensor" else spec.gpus


def is_sharded(spec: TrainSpec) -> bool:
    return spec.parallelism != "ddp"


def gathered_precision(spec: TrainSpec) -> str:
    """Of the copies of fp32 weights that it computes with, as FSDP does in the place of autocast; ``no``: of none."""
    return spec.mixed_precision if spec.parallelism in ("fsdp", "fsdp_hybrid") else "no"


def on_one_gpu(spec: TrainSpec) -> TrainSpec:
    """The same work of one rank, which has nothing to share."""
    return replace(spec, gpus=1, parallelism="ddp")


def on_fewer(wide: TrainSpec, gpus: int) -> TrainSpec | None:
    """The same work for each of so many; one has nothing to share, and DDP's figure serves every parallelism."""
    try:
        return on_one_gpu(wide) if gpus == 1 else replace(wide, gpus=gpus)
    except ValueError:  # a parallelism that takes more GPUs than these
        return None


def _clash(spec: TrainSpec) -> str | None:
    if not is_sharded(spec):
        return None
    if spec.gpus == 1:
        return f"parallelism={spec.parallelism!r} has nothing to shard over on one GPU; use parallelism='ddp'"
    return _tensor_clash(spec) if spec.parallelism == "tensor" else _fsdp_clash(spec)


def _fsdp_clash(spec: TrainSpec) -> str | None:
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


def _tensor_clash(spec: TrainSpec) -> str | None:
    sizes = spec.architecture.geometry
    heads = (sizes.num_heads, sizes.num_key_value_heads) if sizes else ()
    if any(each % spec.gpus for each in heads):
        return f"tensor shares attention's heads: {spec.gpus} GPUs do not divide {' and '.join(map(str, heads))}"
    # Some weights are shared and others are not: what works on several at once takes no such list.
    if spec.optimizer not in _ONE_BY_ONE:
        return f"tensor with {spec.optimizer} does not train: use optimizer={' or '.join(map(repr, _ONE_BY_ONE))}"
    if spec.mixed_precision == "fp16":
        return "tensor with fp16 loss scaling does not train: use bf16"
    untried = (("fp8", spec.fp8 != "no"), ("save_checkpoint", spec.save_checkpoint), ("lora", spec.lora))
    for name, value in untried:
        if value:
            return f"tensor with {name} was never tried here; leave {name} out"
    return None


def _axis(base: TrainSpec, search: Search) -> Axis:
    found = []
    for parallelism in PARALLELISMS[:1] if search.on_cpu or base.gpus == 1 else PARALLELISMS[:-1]:
        try:
            replace(base, parallelism=parallelism, model_precision="fp32", mixed_precision="bf16")
        except ValueError:  # more GPUs than there are
            continue
        found.append(parallelism)
    return Axis.over("parallelism", found)


@dataclass(frozen=True)
class ParallelismEvidence:
    """How the ranks shared the work."""

    world_size: int | None = None
    parallelism: str = "ddp"
    """Older records knew no other; ``none``: of one rank alone."""
    mesh: Sequence[int] | None = None
    """Sizes of the mesh that the weights are sharded over."""
    gathered_dtype: str | None = None
    """To which FSDP casts weights as it gathers them; empty: it does not."""


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
    # accelerate would train with DDP there, and say nothing.
    why_not_on_cpu=lambda spec: "accelerate shards over GPUs only" if is_sharded(spec) else None,
    small=lambda spec: {"gpus": few_ranks(spec)},
    plain=at_default("gpus", "parallelism"),
    axis=_axis,
    evidence=ParallelismEvidence,
    checks={"gpus": _world_size, "parallelism": _parallelism},
)
