"""What must train as its plain form does, as data: each rung of the ladder, and every other way to be faster.

Each is made small before it is trained (docs/explanation/parity.md), so sizes decide nothing here but their shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from perf_tests.families import FAMILIES
from perf_tests.ladder import LADDER, on_cpu
from perf_tests.optimisations import HUB_KERNELS
from pytest_llmperf import TrainSpec

_PLAIN = TrainSpec(model="llama-3.2-1b", micro_batch_size=8)
_LIGER = replace(_PLAIN, liger=True)
_OPT = TrainSpec(model="opt-1.3b", micro_batch_size=8)
_MIXTURE = TrainSpec(model="mixtral-like-0.6b", micro_batch_size=8)

_BY_PACKAGES = ("flash_attention_2", "flex_attention", "flash_attention_3")
# Liger's for this family, one by one; of the two losses it takes one at a time.
_KERNELS = ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")


def _kernels() -> Iterator[TrainSpec]:
    """That there are on a GPU alone."""
    yield from (replace(_LIGER, liger_kernels=kernel) for kernel in _KERNELS)
    yield from (replace(_PLAIN, sdpa_backend=backend) for backend in ("flash", "cudnn", "math"))
    yield replace(_OPT, sdpa_backend="efficient")
    yield from (replace(_LIGER, attention=attention) for attention in _BY_PACKAGES)
    yield replace(_LIGER, torch_compile=True, torch_compile_scope="layers", liger_kernels="fused_linear_cross_entropy")
    yield from (
        replace(_PLAIN, torch_compile=True, torch_compile_scope="layers", fp8=recipe)
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    )
    yield replace(
        _PLAIN,
        model_precision="fp32",
        torch_compile=True,
        torch_compile_scope="layers",
        fp8="tensorwise_all_gather",
        gpus=2,
        parallelism="fsdp",
    )
    yield replace(_LIGER, optimizer="adamw_torch_8bit")
    yield replace(_PLAIN, loss="cut")
    yield replace(_LIGER, offloading="activations")
    yield replace(
        _LIGER,
        liger_kernels="rms_norm+swiglu+fused_linear_cross_entropy",
        gradient_checkpointing=True,
        checkpointing_policy="selective",
    )
    yield from (replace(_LIGER, mixed_precision="no", gpus=2, parallelism="fsdp"), replace(_LIGER, gpus=2))
    yield replace(_LIGER, mixed_precision="no", gpus=4, parallelism="fsdp_hybrid")
    yield from (replace(_PLAIN, mixed_precision="no", gpus=2, parallelism=one) for one in ("tensor", "context"))
    yield replace(_LIGER, model_precision="fp32", mixed_precision="fp16")


def _everywhere() -> Iterator[TrainSpec]:
    """What needs no GPU."""
    yield replace(_PLAIN, torch_compile=True, torch_compile_scope="layers")
    yield replace(_PLAIN, gradient_checkpointing=True)
    yield replace(_PLAIN, gradient_checkpointing=True, checkpointing_policy="selective")
    yield replace(_PLAIN, gradient_accumulation_steps=4)
    yield replace(_PLAIN, optimizer="adamw_torch_fused")
    yield replace(_PLAIN, optimizer="adafactor")
    yield replace(_PLAIN, optimizer="muon")
    yield replace(_PLAIN, gpus=2)
    yield replace(_PLAIN, gpus=2, gradient_accumulation_steps=2)
    yield replace(_PLAIN, mixed_precision="no")
    yield from (replace(_PLAIN, model_precision="fp32", gpus=2, parallelism=one) for one in ("zero2", "zero3"))
    yield replace(_PLAIN, lora=True, gradient_checkpointing=True)
    yield replace(_PLAIN, loss="chunked")
    yield replace(_PLAIN, hub_kernels=HUB_KERNELS)
    yield from (replace(_MIXTURE, experts=experts) for experts in ("eager", "batched_mm", "grouped_mm"))


# Of rungs that differ by their micro-batch alone, one; Liger where it changes something.
_RUNGS = [replace(rung.spec, micro_batch_size=8, steps=60, min_steps=16) for rung in LADDER if not rung.inactive]
_FAMILIES = [replace(family.spec, liger=not family.inactive) for family in FAMILIES if family.spec.liger]

PARITY = list(dict.fromkeys([*_RUNGS, *_kernels(), *_everywhere(), *_FAMILIES]))
PARITY_ON_CPU = list(dict.fromkeys(on_cpu(spec) for spec in [*_RUNGS, *_everywhere()] if not spec.liger))
