"""Recomputation: what the layers' checkpoint function keeps, and whether it is there."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import TrainingArguments

from pytest_llmperf.settings.compilation import RecomputationEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training


def arguments(spec: TrainSpec) -> Mapping[str, Any]:
    if not spec.gradient_checkpointing:
        return {}
    # transformers 5.23 renames the argument and warns of the old name; 5.17 has only the old one.
    known = {field.name for field in fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if spec.checkpointing_policy == "selective":
        if spec.attention == "flash_attention_2":
            importlib.import_module("flash_attn.flash_attn_interface")  # or its operator is not there yet to be named
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, list(kept_operators()))
    return {name: True, f"{name}_kwargs": kwargs}


def kept_operators() -> Iterator[Any]:
    """What is dear to compute again for the memory it takes: matrix products and fused attention."""
    for name in (
        "mm addmm bmm baddbmm _scaled_mm _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention"
    ).split():
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            yield packet.default
    flash = getattr(torch.ops.flash_attn, "_flash_attn_forward", None)
    if flash is not None:
        yield flash.default


def witness(training: Training) -> RecomputationEvidence:
    checkpointed = [each for each in training.model.modules() if getattr(each, "gradient_checkpointing", False)]
    functions = [getattr(each, "_gradient_checkpointing_func", None) for each in checkpointed]
    policies = [
        "selective" if "context_fn" in getattr(function, "keywords", {}) else "full"
        for function in functions
        if function
    ]
    return RecomputationEvidence(
        gradient_checkpointing=len(checkpointed) > 0, checkpointing_policy=policies[0] if policies else ""
    )
