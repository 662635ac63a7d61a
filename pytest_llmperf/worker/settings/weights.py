"""Weights: random ones drawn from the seed, or those of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker import refusal


def model_with_weights(
    spec: TrainSpec, hf_config: PreTrainedConfig, device: torch.device, **arguments: Any
) -> PreTrainedModel:
    """The model of ``hf_config`` on ``device``, as transformers makes it with ``arguments``.

    Raises:
        FileNotFoundError: the spec's folder of weights is not there.
        RefusedError: transformers does not build it.
    """
    if spec.weights is None:
        # Drawing 1.2e9 weights takes a minute on the host and half a second on the GPU.
        with device, refusal.of_what_cannot_be_built(hf_config.model_type):
            return AutoModelForCausalLM.from_config(hf_config, **arguments)
    if not Path(spec.weights).is_dir():
        raise FileNotFoundError(f"no folder of weights {spec.weights}, expected one as save_pretrained writes it")
    model = AutoModelForCausalLM.from_pretrained(spec.weights, config=hf_config, local_files_only=True, **arguments)
    return model.to(device)
