"""Liger: what its patch is told to replace, and which of a model's functions and forward passes are its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pytest_llmperf.settings.liger import LIGER_KERNELS, LigerEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training


def liger_kernels(spec: TrainSpec) -> dict[str, bool] | None:
    """What Liger's patch is told to replace; ``None``: what it replaces by itself."""
    if spec.liger_kernels == "all":
        return None
    chosen = spec.liger_kernels.split("+")
    return {name: name in chosen for name in LIGER_KERNELS}


def arguments(spec: TrainSpec, _device: torch.device) -> Mapping[str, Any]:
    return {"use_liger_kernel": spec.liger, "liger_kernel_config": liger_kernels(spec)}


class Witness(logging.Handler):
    """Keeps what Liger says when it patches nothing: one INFO line is all it gives. The rest is seen at the end."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("liger_kernel.transformers.monkey_patch")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __call__(self, training: Training) -> LigerEvidence:
        forwards = liger_forwards(training.model)
        return LigerEvidence(
            liger_modules=len(forwards),
            liger_forwards=sorted(set(forwards)),
            liger_functions=liger_functions(training.model),
            liger_note=self.lines[-1] if self.lines else "",
        )


def liger_forwards(model: nn.Module) -> list[str]:
    """Of each module whose forward pass is one of Liger's, that function's name."""
    found = []
    for module in model.modules():
        forward = getattr(module.forward, "__func__", module.forward)
        forward = getattr(forward, "__wrapped__", forward)
        if "liger_kernel" in (getattr(forward, "__module__", "") or "") + type(module).__module__:
            found.append(str(forward.__qualname__))
    return found


def liger_functions(model: nn.Module) -> list[str]:
    """What of Liger replaces functions, which no module shows: ``rope`` and ``cross_entropy``."""
    functions = {
        "rope": getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None),
        "cross_entropy": nn.functional.cross_entropy,
    }
    return [name for name, function in functions.items() if "liger" in (getattr(function, "__module__", "") or "")]


WITNESSES = {"liger": lambda *_: Witness()}
