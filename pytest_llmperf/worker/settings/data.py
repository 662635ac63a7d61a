"""Data: who fetches it; the recipe's ``data.py`` makes what is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_llmperf.observe.device import is_gpu
from pytest_llmperf.settings.arguments import OPEN, values
from pytest_llmperf.settings.data import DataEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training


def arguments(spec: TrainSpec, device: torch.device) -> Mapping[str, Any]:
    """Without an accelerator there is nothing to pin for; who says otherwise is heard."""
    pins = "dataloader_pin_memory"
    return {} if pins in values(spec, OPEN[0]) else {pins: is_gpu(device)}


def _seen(training: Training) -> DataEvidence:
    loader = training.trainer.callback_handler.train_dataloader
    return DataEvidence(
        data_workers=loader.num_workers,
        data_prefetch=loader.prefetch_factor or 0,
        # Without an accelerator PyTorch pins nothing, whatever it is asked for.
        data_pinned=bool(loader.pin_memory) and is_gpu(training.device),
    )


WITNESSES = {"data": lambda *_: _seen}
