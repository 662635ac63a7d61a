"""From a spec to the model and the Trainer's arguments: every optimisation is switched on here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainingArguments

from pytest_llmperf.spec import TrainSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(spec: TrainSpec, config: Mapping[str, Any], device: torch.device) -> PreTrainedModel:
    """The model on ``device`` in the spec's precision: random weights, or those of ``spec.weights``."""
    # A fresh configuration each time: a failed attention name stays on the object it was tried on.
    hf_config = AutoConfig.for_model(**config)
    hf_config.use_cache = False
    kwargs = {"dtype": DTYPES[spec.model_precision], "attn_implementation": spec.attention}
    if spec.weights is not None:
        if not Path(spec.weights).is_dir():
            raise FileNotFoundError(f"no folder of weights {spec.weights}, expected one as save_pretrained writes it")
        model = AutoModelForCausalLM.from_pretrained(spec.weights, config=hf_config, local_files_only=True, **kwargs)
        return model.to(device)
    with device:  # drawing 1.2e9 weights takes a minute on the host and half a second on the GPU
        return AutoModelForCausalLM.from_config(hf_config, **kwargs)


def training_arguments(spec: TrainSpec, folder: Path, device: torch.device) -> TrainingArguments:
    """The Trainer's arguments: its defaults, but for what the spec says and what would only add host work."""
    cuda = device.type == "cuda"
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=spec.steps,
        per_device_train_batch_size=spec.micro_batch_size,
        gradient_accumulation_steps=spec.gradient_accumulation_steps,
        bf16=spec.mixed_precision == "bf16",
        fp16=spec.mixed_precision == "fp16",
        tf32=spec.tf32 if cuda else None,
        optim=spec.optimizer,
        torch_compile=spec.torch_compile,
        use_liger_kernel=spec.liger,
        seed=spec.seed,
        use_cpu=not cuda,
        ddp_backend="nccl" if cuda else "gloo",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=cuda,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        # The filter waits for the device at every step to look at the loss; the record holds every loss instead,
        # and one that is not finite makes the launch invalid.
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        **_checkpointing(spec),
    )


def _checkpointing(spec: TrainSpec) -> dict[str, Any]:
    if not spec.gradient_checkpointing:
        return {}
    # transformers 5.23 renames the argument and warns of the old name; 5.17 has only the old one.
    known = {field.name for field in fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}}
