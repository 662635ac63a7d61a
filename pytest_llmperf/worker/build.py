"""From a spec to the model and the Trainer's arguments; each setting's part is its twin's in ``settings/``."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from pytest_llmperf.observe.device import is_gpu
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker import refusal
from pytest_llmperf.worker.settings import compilation, data, liger, parallelism, precision, recomputation
from pytest_llmperf.worker.settings.attention import check_attention
from pytest_llmperf.worker.settings.weights import model_with_weights


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
    hf_config, dtype = hf_config_of(config), precision.DTYPES[spec.model_precision]
    check_attention(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)], hf_config, spec.attention)
    model = model_with_weights(spec, hf_config, device, dtype=dtype, attn_implementation=spec.attention)
    refusal.check_direction(model.config)
    precision.to_fp8(spec, model)
    return model


def training_arguments(spec: TrainSpec, folder: Path, device: torch.device, steps: int) -> TrainingArguments:
    """The Trainer's arguments: its defaults, but for what the spec says and what would only add host work.

    ``steps``: at most, those that are traced among them.
    """
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=spec.micro_batch_size,
        gradient_accumulation_steps=spec.gradient_accumulation_steps,
        optim=spec.optimizer,
        # Constant: a schedule over the number of steps would make what is learnt depend on how long one measures.
        lr_scheduler_type="constant",
        seed=spec.seed,
        use_cpu=not is_gpu(device),
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        # The filter waits for the device at every step to look at the loss; the record holds every loss instead,
        # and one that is not finite makes the launch invalid.
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        **precision.arguments(spec, device),
        **liger.arguments(spec),
        **compilation.arguments(spec),
        **recomputation.arguments(spec),
        **parallelism.arguments(spec, device),
        **data.arguments(spec, device),
    )
