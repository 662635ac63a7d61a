"""``python -m tests.worker.ligered``: what Liger patches by choice of kernels, and what steps with it compute.

Each in a fork of a process that has imported what all need, since Liger replaces functions and classes for good. Every
line on its output is the JSON of one.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.integrations.liger import apply_liger_kernel

from pytest_llmperf import TrainSpec
from pytest_llmperf.settings import models
from pytest_llmperf.worker.build import build_model, hf_config_of
from pytest_llmperf.worker.estimate.arithmetic import Arithmetic, as_on_gpu
from pytest_llmperf.worker.settings.liger import liger_forwards, liger_functions, liger_kernels

CHOICES = {
    "llama-tiny rope": (["rope"], []),
    "llama-tiny rms_norm+swiglu": ([], ["LigerRMSNorm.forward", "LigerSwiGLUMLP.forward"]),
    "llama-tiny fused_linear_cross_entropy": ([], ["lce_forward"]),
    "mixtral-tiny rms_norm+swiglu": ([], ["LigerExperts.forward", "LigerRMSNorm.forward"]),
}
STEPS = {
    "llama-tiny": ["LigerFusedLinearCrossEntropyFunction"],
    "mixtral-tiny": ["LigerFusedMoEFunction", "LigerFusedLinearCrossEntropyFunction"],
}


def patched(words: str) -> list[Any]:
    """Its functions and its forwards."""
    name, kernels = words.split()
    spec = TrainSpec(model=name, liger=True, liger_kernels=kernels)
    model = build_model(spec, spec.architecture.config, torch.device("cpu"))
    apply_liger_kernel(model, liger_kernels(spec))
    return [liger_functions(model), sorted(set(liger_forwards(model)))]


def computed(name: str) -> list[Any]:
    """The FLOPs of a step of 64 tokens, and Liger's operators in it."""
    torch.Tensor.item, torch.Tensor.__bool__ = torch.Tensor.numel, lambda _: True
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_gpu(liger=True):
        config = hf_config_of(models.resolve(name).config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
        apply_liger_kernel(model, None)
        ids = torch.zeros(1, 64, dtype=torch.long)
        with Arithmetic() as arithmetic:
            model(input_ids=ids, labels=ids).loss.backward()
    return [arithmetic.flops, [one for one in arithmetic.by_operator if "Liger" in one]]


def main() -> None:
    """All of them."""
    for tell, names in ((patched, CHOICES), (computed, STEPS)):
        for name in names:
            if os.fork() == 0:
                print(json.dumps([name, *tell(name)]), flush=True)  # noqa: T201 - whoever started this reads it
                os._exit(0)
            if os.wait()[1]:
                raise SystemExit(f"{name} was not told")


if __name__ == "__main__":
    main()
