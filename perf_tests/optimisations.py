"""The optimisations that the chapter's ladder does not have, each switched on over one of its rungs, as data.

Most on a GPU alone: on a CPU they do nothing, or are not there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perf_tests.ladder import on_cpu
from pytest_llmperf import TrainSpec


@dataclass(frozen=True)
class Optimisation:
    """One case."""

    spec: TrainSpec
    known_to_fail: str = ""
    """Why it does not train with today's versions; the day it does, the suite says so."""


# Steady after four steps and known to 0.2 % after twelve: no more are needed.
_SHORT: dict[str, Any] = {"steps": 30, "min_steps": 12}

# Rungs 15.9, 15.7 and 15.2 of the chapter.
_BASE = TrainSpec(model="llama-3.2-1b", liger=True, micro_batch_size=37, **_SHORT)
_PLAIN = replace(_BASE, liger=False, micro_batch_size=14)
_FP32 = replace(
    _PLAIN, model_precision="fp32", mixed_precision="no", attention="eager", micro_batch_size=7, steps=16, min_steps=12
)
_OPT = TrainSpec(model="opt-1.3b", micro_batch_size=32, **_SHORT)

# Each layer compiled by itself, and Liger's loss around them.
_LAYERS = replace(
    _BASE,
    liger_kernels="fused_linear_cross_entropy",
    torch_compile=True,
    torch_compile_scope="layers",
)
# Eight experts a layer, of which a token takes two: few sequences, since batched products copy weights for each token.
_MIXTURE = TrainSpec(model="mixtral-like-0.6b", micro_batch_size=1, **_SHORT)
# Beyond rung 15.9: the fastest configurations of one H200 (docs/explanation/ladder.md).
_LARGE: dict[str, Any] = {"optimizer": "adamw_torch_fused", "micro_batch_size": 90}

_ILLEGAL = "torch 2.11 with liger-kernel 0.8.5: an illegal memory access in the first step"

#: Llama's norms by the kernel that lies here, as a record has it: from the folder in which pytest was started.
HUB_KERNELS = {"LlamaRMSNorm": os.path.relpath(Path(__file__).with_name("kernels") / "rmsnorm") + ":LlamaRMSNorm"}

# What a CPU has, too.
_EVERYWHERE = (
    replace(_PLAIN, hub_kernels=HUB_KERNELS),
    *(replace(_MIXTURE, experts=experts) for experts in ("eager", "grouped_mm")),
    # Its copies of 1,024 tokens' weights are more than 80 GiB.
    replace(_MIXTURE, experts="batched_mm", sequence_length=128),
    replace(_PLAIN, loss="chunked"),
    replace(_PLAIN, optimizer="muon"),
)
# All of Liger but its loss.
_LAYERS_OF_LIGER = replace(_BASE, liger_kernels="rope+rms_norm+swiglu")

_ON_GPU = (
    # What compiles comes first: where several run at once, the longest should not begin last.
    replace(_PLAIN, torch_compile=True, fp8="tensorwise"),
    replace(_PLAIN, torch_compile=True),
    replace(_PLAIN, torch_compile=True, torch_compile_mode="reduce-overhead"),
    replace(_LAYERS, fp8="rowwise"),
    replace(_LAYERS, fp8="tensorwise"),
    replace(_LAYERS, fp8="tensorwise", **_LARGE),
    replace(_LAYERS, **_LARGE),
    _LAYERS,
    replace(_PLAIN, torch_compile=True, torch_compile_scope="layers"),
    replace(_OPT, torch_compile=True, torch_compile_scope="layers"),
    replace(_BASE, attention="flex_attention"),
    *(replace(_BASE, attention=attention) for attention in ("flash_attention_2", "flash_attention_3")),
    replace(_BASE, sdpa_backend="flash"),
    replace(_OPT, sdpa_backend="efficient"),
    replace(_BASE, **_LARGE),
    replace(_BASE, optimizer="adamw_torch_fused"),
    replace(_BASE, optimizer="adamw_torch_8bit"),
    replace(_BASE, optimizer="adamw_bnb_8bit"),
    # Its states may go to the host.
    replace(_BASE, optimizer="paged_adamw_32bit", micro_batch_size=8),
    replace(_BASE, optimizer="adafactor"),
    replace(_BASE, optimizer="sgd"),
    replace(_BASE, gradient_checkpointing=True),
    replace(
        _BASE,
        # Not Liger's rope: it would write over what was kept.
        liger_kernels="rms_norm+swiglu+fused_linear_cross_entropy",
        gradient_checkpointing=True,
        checkpointing_policy="selective",
    ),
    # All of them go to the host and back: few sequences, and few steps.
    replace(_BASE, offloading="activations", micro_batch_size=8, steps=16),
    replace(_BASE, gradient_checkpointing=True, offloading="activations"),
    replace(_BASE, gradient_accumulation_steps=4, steps=16),
    *(replace(_LAYERS_OF_LIGER, loss=loss) for loss in ("chunked", "cut")),
    replace(_BASE, model_precision="fp32"),
    replace(_BASE, model_precision="fp32", mixed_precision="fp16"),
    replace(_BASE, mixed_precision="no"),
    replace(_FP32, tf32=True),
)

OPTIMISATIONS = [
    *(Optimisation(spec) for spec in _ON_GPU),
    *(Optimisation(spec) for spec in _EVERYWHERE),
    Optimisation(replace(_BASE, torch_compile=True), _ILLEGAL),
    Optimisation(
        replace(_BASE, torch_compile=True, liger_kernels="fused_linear_cross_entropy"),
        _ILLEGAL,
    ),
]

OPTIMISATIONS_ON_CPU = [Optimisation(on_cpu(spec)) for spec in _EVERYWHERE]
