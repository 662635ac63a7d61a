"""From a spec to the model and the Trainer's arguments: every optimisation is switched on here."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from pytest_llmperf.observe.device import SDPA_SWITCHES, allow_tf32, collectives, is_gpu, matmul_precision, sdpa_kernels
from pytest_llmperf.settings.checks import LIGER_KERNELS
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker import refusal

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# FSDP lets go of a layer's weights when its forward pass is done, and gathers them again in the backward pass.
RESHARD_AFTER_FORWARD = True


def hf_config_of(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a causal language model, as transformers has it; without a cache, which training lacks.

    Of a model that also sees or hears it is the text part's, where that is a causal language model by itself: token
    rows use nothing else, and the other parts would get no gradient.

    Raises:
        RefusedError: transformers has no such model, or does not take this configuration.
    """
    if config["model_type"] not in CONFIG_MAPPING:
        raise refusal.unknown_type(config["model_type"])
    # A fresh configuration each time: a failed attention name stays on the object it was tried on.
    # And a copy: transformers writes into the parts of what it is given.
    with refusal.of_what_cannot_be_built(config["model_type"]):
        hf_config = AutoConfig.for_model(**deepcopy(dict(config)))
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal.no_language_model(config["model_type"])
    with refusal.of_what_cannot_be_built(config["model_type"]):  # some have two, and cannot say which
        text = hf_config.get_text_config()
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING and text.model_type != hf_config.model_type:
        hf_config = text
    hf_config.use_cache = False
    return hf_config


def build_model(spec: TrainSpec, config: Mapping[str, Any], device: torch.device) -> PreTrainedModel:
    """The model on ``device`` in the spec's precision: random weights, or those of ``spec.weights``.

    Raises:
        RefusedError: transformers has no such model, or not with this attention, or it is not causal.
    """
    hf_config = hf_config_of(config)
    refusal.check_attention(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)], hf_config, spec.attention)
    kwargs = {"dtype": DTYPES[spec.model_precision], "attn_implementation": spec.attention}
    if spec.weights is not None:
        if not Path(spec.weights).is_dir():
            raise FileNotFoundError(f"no folder of weights {spec.weights}, expected one as save_pretrained writes it")
        model = AutoModelForCausalLM.from_pretrained(spec.weights, config=hf_config, local_files_only=True, **kwargs)
        model = model.to(device)
    else:
        with (
            device,
            refusal.of_what_cannot_be_built(hf_config.model_type),
        ):  # drawing 1.2e9 weights takes a minute on the host and half a second on the GPU
            model = AutoModelForCausalLM.from_config(hf_config, **kwargs)
    refusal.check_direction(model.config)
    if spec.fp8 != "no":
        _to_fp8(model, spec.fp8)
    return model


def _to_fp8(model: PreTrainedModel, recipe: str) -> None:
    """Let the linear layers multiply in float8, but for the vocabulary's, whose products the loss is sensitive to."""
    # Imported here: only fp8 needs the package.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415

    head = model.get_output_embeddings()
    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, _name: module is not head and _in_whole_rows(module),
    )


def _in_whole_rows(linear: nn.Module) -> bool:
    # The matrix units take operands in rows of 16 bytes.
    return isinstance(linear, nn.Linear) and linear.in_features % 16 == 0 and linear.out_features % 16 == 0


def compile_layers(model: PreTrainedModel, mode: str) -> None:
    """Compile each repeated layer in place; they share their code, so that the first one's graphs serve all.

    Source: PyTorch's recipe of regional compilation.
    """
    repeated = set(model._no_split_modules or ())  # noqa: SLF001 - transformers' one list of them
    layers = [module for module in model.modules() if type(module).__name__ in repeated]
    if not layers:
        raise refusal.RefusedError(
            f"{type(model).__name__} names no repeated layers to compile: use torch_compile_scope='model'"
        )
    for layer in layers:
        layer.compile(mode=mode)


@cache
def found_settings() -> Mapping[str, Any]:
    """What the user's environment has set of all that a launch forces; asked before the first time that it does."""
    return {"sdpa_kernels": sdpa_kernels(), "matmul_precision": matmul_precision()}


def choose_sdpa(backend: str) -> None:
    """Leave PyTorch's attention only the kernel ``backend``; ``auto`` leaves it those that this environment has."""
    wanted = found_settings()["sdpa_kernels"] if backend == "auto" else [backend]
    for name, switch in SDPA_SWITCHES.items():
        if (name in wanted) != (name in sdpa_kernels()):
            switch(name in wanted)


def force_tf32(spec: TrainSpec) -> None:
    """Let fp32 products use TF32 or not, as the spec says: accelerate switches it on for compiled fp32 training."""
    allow_tf32(spec.tf32)


def training_arguments(spec: TrainSpec, folder: Path, device: torch.device, steps: int) -> TrainingArguments:
    """The Trainer's arguments: its defaults, but for what the spec says and what would only add host work.

    ``steps``: at most, those that are traced among them.
    """
    on_gpu = is_gpu(device)
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=spec.micro_batch_size,
        gradient_accumulation_steps=spec.gradient_accumulation_steps,
        bf16=spec.mixed_precision == "bf16",
        fp16=spec.mixed_precision == "fp16",
        tf32=spec.tf32 if on_gpu else None,
        optim=spec.optimizer,
        # Constant: a schedule over the number of steps would make what is learnt depend on how long one measures.
        lr_scheduler_type="constant",
        torch_compile=spec.torch_compile and spec.torch_compile_scope == "model",
        torch_compile_mode=spec.torch_compile_mode
        if spec.torch_compile_mode != "default" and spec.torch_compile_scope == "model"
        else None,
        use_liger_kernel=spec.liger,
        liger_kernel_config=liger_kernels(spec),
        seed=spec.seed,
        use_cpu=not on_gpu,
        ddp_backend=collectives(device),
        ddp_find_unused_parameters=False,
        dataloader_num_workers=spec.data_workers,
        dataloader_prefetch_factor=spec.data_prefetch,
        dataloader_pin_memory=on_gpu and spec.data_pinned,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        # The filter waits for the device at every step to look at the loss; the record holds every loss instead,
        # and one that is not finite makes the launch invalid.
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        **_checkpointing(spec),
        **_sharding(spec),
    )


def liger_kernels(spec: TrainSpec) -> dict[str, bool] | None:
    """What Liger's patch is told to replace; ``None``: what it replaces by itself."""
    if spec.liger_kernels == "all":
        return None
    chosen = spec.liger_kernels.split("+")
    return {name: name in chosen for name in LIGER_KERNELS}


def _sharding(spec: TrainSpec) -> dict[str, Any]:
    if spec.parallelism == "ddp":
        return {}
    config = {"version": 2, "reshard_after_forward": RESHARD_AFTER_FORWARD}
    arguments: dict[str, Any] = {"fsdp": True, "fsdp_config": config}
    if spec.parallelism == "fsdp_hybrid":
        replicas, shards = replicas_and_shards(spec, int(os.environ["LOCAL_WORLD_SIZE"]))
        arguments["parallelism_config"] = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    return arguments


def replicas_and_shards(spec: TrainSpec, on_this_node: int) -> tuple[int, int]:
    """Over how many ranks FSDP shards, and how often it repeats that, with ``on_this_node`` of the ranks on each node.

    Gathering stays within a node where there are several.
    """
    shards = spec.gpus
    if spec.parallelism == "fsdp_hybrid":
        shards = on_this_node if on_this_node < spec.gpus else spec.gpus // 2
    return spec.gpus // shards, shards


def _checkpointing(spec: TrainSpec) -> dict[str, Any]:
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
    names = (
        "mm addmm bmm baddbmm _scaled_mm _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention"
    )
    for name in names.split():
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            yield packet.default
    flash = getattr(torch.ops.flash_attn, "_flash_attn_forward", None)
    if flash is not None:
        yield flash.default
