"""Data: who fetches it; the recipe's ``data.py`` makes what is read, and tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_llmperf.observe.device import is_gpu
from pytest_llmperf.settings.data import DataEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training


def arguments(spec: TrainSpec, device: torch.device) -> Mapping[str, Any]:
    return {
        "dataloader_num_workers": spec.data_workers,
        "dataloader_prefetch_factor": spec.data_prefetch,
        "dataloader_pin_memory": is_gpu(device) and spec.data_pinned,
    }


def witness(training: Training) -> DataEvidence:
    loader = training.trainer.callback_handler.train_dataloader
    return DataEvidence(
        data_workers=loader.num_workers,
        data_prefetch=loader.prefetch_factor or 0,
        # Without an accelerator PyTorch pins nothing, whatever it is asked for.
        data_pinned=bool(loader.pin_memory) and is_gpu(training.device),
    )
