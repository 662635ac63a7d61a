"""What a launch's evidence says where all that was asked for was active.

Ranks of tests read it too: nothing of the plugin's own process is imported here.
"""

from __future__ import annotations

from typing import Any

from pytest_llmperf.settings.liger import hub_kernels
from pytest_llmperf.settings.precision import GATHERED
from pytest_llmperf.settings.train_spec import TrainSpec


def _data(spec: TrainSpec) -> dict[str, Any]:
    """What was read of a text."""
    if spec.data == "random":
        return {}
    read = {"text": spec.text_files.fingerprint, "tokenizer": spec.tokenizer_files.fingerprint}
    apart = {"documents": "apart"} if spec.rows in ("packed_apart", "padding_free") else {}
    return {**apart, "data": {**read, "split": spec.split, "rows": spec.rows}, "epochs": 0.5, "tokenised_by": "nobody"}


def _hub_kernels(spec: TrainSpec) -> dict[str, Any]:
    """By layer, the kernel in all of its modules."""
    return {
        name: {"layer": kernel.layer, "kernel": kernel.name, "repository": kernel.name, "revision": "0a1b2c3d4e5f"}
        | {"modules": 5, "left": 0}
        for name, kernel in hub_kernels(spec).items()
    }


def evidence_of(spec: TrainSpec) -> dict[str, Any]:
    """Evidence that everything asked for was active."""
    dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
    return {
        "device_type": "cpu",
        "world_size": spec.gpus,
        "attention": spec.attention,
        **({} if spec.offloading == "no" else {"offloaded_bytes": 2**20}),
        **({"hub_kernels": _hub_kernels(spec)} if spec.hub_kernels else {}),
        **({} if spec.loss == "model" else {"loss": spec.loss}),
        **({} if spec.experts == "auto" else {"experts": spec.experts}),
        "parameter_dtypes": {dtype[spec.model_precision]: 1000},
        "autocast_dtype": None if spec.mixed_precision == "no" else dtype[spec.mixed_precision],
        "tf32": spec.tf32,
        "liger_modules": 10 if spec.liger else 0,
        "liger_forwards": ["LigerRMSNorm.forward", "LigerSwiGLUMLP.forward", "lce_forward"] if spec.liger else [],
        "liger_functions": ["rope"] if spec.liger and spec.liger_kernels == "all" else [],
        "liger_note": "",
        "optimizer": "AdamW",
        "optimizer_fused": spec.optimizer == "adamw_torch_fused",
        **_data(spec),
        "data_workers": 0,
        "data_prefetch": None,
        "data_pinned": True,
        "gradient_checkpointing": spec.gradient_checkpointing,
        "checkpointing_policy": spec.checkpointing_policy if spec.gradient_checkpointing else "",
        "fp8_modules": 112 if spec.fp8 != "no" else 0,
        "linear_modules": 1,
        "fp8_recipe": spec.fp8 if spec.fp8 != "no" else "",
        **({"fp8_gathered": 112} if spec.fp8 == GATHERED else {}),
        "parallelism": spec.parallelism if spec.gpus > 1 else "none",
        "torch_compile": spec.torch_compile,
        "torch_compile_mode": spec.torch_compile_mode if spec.torch_compile else "",
        "torch_compile_scope": spec.torch_compile_scope if spec.torch_compile else "",
    }
