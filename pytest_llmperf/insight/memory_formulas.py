"""What a training step needs of a GPU's memory: the prediction's parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.spec.train_spec import TrainSpec

#: In the order in which they are told.
PARTS: Mapping[str, str] = {
    "weights": "the model, or this rank's shards of it",
    "gathered": "weights of all ranks, of the layers that FSDP has at hand",
    "gradients": "of the weights, as far as they exist at the peak",
    "optimizer": "its states",
    "activations": "kept for the backward pass, and what it works in",
    "logits": "of the vocabulary's size",
    "buckets": "in which DDP reduces gradients",
    "workspace": "of the matrix library",
    "rounding": "of the allocator's blocks, beyond what was asked for",
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank at its peak, by part."""

    parts: Mapping[str, int]

    @property
    def peak_allocated_bytes(self) -> int:
        return sum(self.parts.values())

    def error(self, launch: Launch) -> float:
        """Of the prediction, as a fraction of what ``launch`` took at most on its worst rank."""
        return self.peak_allocated_bytes / launch.peak_allocated_bytes - 1


#: Whose predictions are held against measured ones.
_PROVEN = frozenset({"gemma3_text", "gpt2", "llama", "mistral", "mixtral", "opt", "qwen3"})

_FUSED = "is counted as any fused attention: its inputs, its output and a number a row"


def caveats(spec: TrainSpec) -> list[str]:
    """What is not modelled of ``spec``, or not proven, a line each."""
    sharded = spec.parallelism != "ddp"
    found = {
        "torch_compile is not modelled: this is without it, and compiled kernels usually keep less": spec.torch_compile,
        f"flash_attention_2 {_FUSED}": spec.attention == "flash_attention_2",
        f"flex_attention {_FUSED}, without its mask of blocks": spec.attention == "flex_attention",
        "fp16 is counted as bf16, without the scaler of its loss": "fp16"
        in (spec.model_precision, spec.mixed_precision),
        "of several GPUs only DDP's buckets are counted: NCCL takes more, outside the allocator": spec.gpus > 1
        and not sharded,
        "of several GPUs only FSDP's buffers are counted: NCCL takes more, outside the allocator": sharded,
        "fsdp_hybrid is counted on one node, where half of the GPUs hold the shards": spec.parallelism == "fsdp_hybrid",
        f"{spec.architecture.model_type} is not among the families that are held against measurements: "
        f"{', '.join(sorted(_PROVEN))}": spec.architecture.model_type not in _PROVEN,
    }
    return [line for line, holds in found.items() if holds]


def newest_on_a_gpu(launches: Sequence[Launch]) -> Launch | None:
    """The launch that a prediction can be held against: on the CPU no allocator counts."""
    on_a_gpu = [launch for launch in launches if launch.evidence.get("device_type") == "cuda"]
    return max(on_a_gpu, key=lambda launch: launch.started_at, default=None)
