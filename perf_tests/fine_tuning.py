"""Fine-tuning as data: full, by LoRA and by LoRA over weights in four bits, of one billion weights and of eight.

Llama 3.1 8B and Qwen3 8B in their published sizes, with random weights; 8,192 tokens a step, as eight sequences or as
one, each layer's activations made again. A full training of them takes 60 and 61 GiB in pure bf16. Llama 3.1 8B on more
GPUs: adapters by DDP, and all weights in fp32 by FSDP, beside which torchtitan and torchao publish rates of eight
H100. On the CPU the tiny model of each family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from perf_tests.ladder import on_cpu
from pytest_llmperf import TrainSpec

#: What is trained of a model: all of it, or adapters.
WAYS: tuple[dict[str, Any], ...] = ({}, {"lora": True}, {"lora": True, "lora_base": "nf4"})

_SHORT: dict[str, Any] = {"steps": 30, "min_steps": 12}
_SMALL = TrainSpec(
    model="llama-3.2-1b", mixed_precision="no", liger=True, optimizer="adamw_torch_fused", micro_batch_size=16, **_SHORT
)
_LARGE = tuple(
    replace(
        _SMALL,
        model=model,
        gradient_checkpointing=True,
        sequence_length=sequence_length,
        micro_batch_size=8192 // sequence_length,
        steps=16,
        min_steps=10,
    )
    for model in ("llama-3.1-8b", "qwen3-8b")
    for sequence_length in (1024, 8192)
)
_COMPILED: dict[str, Any] = {
    "torch_compile": True,
    "torch_compile_scope": "layers",
    "liger_kernels": "fused_linear_cross_entropy",
}
# Below so many GiB a full training of eight billion weights is known not to fit.
_FULL_GIB = 59.0


@dataclass(frozen=True)
class FineTuning:
    """One case."""

    spec: TrainSpec
    oom_below_gib: float | None = None


def _cases() -> Iterator[FineTuning]:
    for base in (_SMALL, *_LARGE):
        for way in WAYS:
            yield FineTuning(replace(base, **way), _FULL_GIB if base in _LARGE and not way else None)
    # What adapters leave free: nothing is made again, or a context is longer.
    yield FineTuning(replace(_LARGE[0], lora=True, gradient_checkpointing=False))
    yield FineTuning(replace(_LARGE[1], **WAYS[2], sequence_length=32768))
    yield FineTuning(replace(_SMALL, lora=True, lora_rank=64, lora_dropout=0.05))
    yield FineTuning(replace(_SMALL, lora=True, lora_targets="q_proj+v_proj"))


def _wide() -> Iterator[FineTuning]:
    for gpus in (2, 4, 8):
        yield FineTuning(replace(_LARGE[0], lora=True, gpus=gpus))
    master: dict[str, Any] = {"model_precision": "fp32", "mixed_precision": "bf16", "parallelism": "fsdp"}
    by_fp8 = [{**_COMPILED, "fp8": recipe} for recipe in ("tensorwise", "tensorwise_all_gather")]
    for how in ({}, _COMPILED, *by_fp8):
        for gpus in (4, 8):
            yield FineTuning(replace(_LARGE[1], gpus=gpus, **master, **how))
    for how in by_fp8:
        yield FineTuning(replace(_SMALL, gpus=2, **master, **how))


FINE_TUNING = [*_cases(), *_wide()]
FINE_TUNING_ON_CPU = [
    FineTuning(spec)
    for spec in dict.fromkeys(
        replace(on_cpu(each.spec), liger=False, optimizer="adamw_torch", micro_batch_size=4) for each in _cases()
    )
]
