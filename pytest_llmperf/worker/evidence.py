"""What was really active in a launch, read off the objects that trained and not off the request."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer


class LigerNotes(logging.Handler):
    """Keeps what Liger says when it patches nothing: one INFO line is all it gives."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("liger_kernel.transformers.monkey_patch")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class AutocastWitness:
    """Notes the autocast type the first time the model's embedding runs, then goes away."""

    def __init__(self, model: PreTrainedModel, device_type: str) -> None:
        self.dtype: str | None = None
        self._device_type = device_type
        # The embedding and not the model: autocast wraps the model's forward, so it is not yet on before it.
        self._hook = model.get_input_embeddings().register_forward_pre_hook(self._look)

    def _look(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_autocast_enabled(self._device_type):
            self.dtype = str(torch.get_autocast_dtype(self._device_type))
        self._hook.remove()


def parameter_dtypes(model: nn.Module) -> dict[str, int]:
    """Parameters by type, as they were before anything wrapped the model."""
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        counts[str(parameter.dtype)] = counts.get(str(parameter.dtype), 0) + parameter.numel()
    return counts


def collect(trainer: Trainer, model: PreTrainedModel, autocast: AutocastWitness, liger: LigerNotes) -> dict[str, Any]:
    """Everything ``judge/validity.py`` holds against the spec; called once, after training."""
    optimizer = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    device = next(model.parameters()).device
    return {
        "device_type": device.type,
        "world_size": trainer.args.world_size,
        "attention": str(model.config._attn_implementation),
        "parameter_dtypes": parameter_dtypes(model),
        "autocast_dtype": autocast.dtype,
        "tf32": _tf32_rounds(device),
        "liger_modules": _liger_modules(model),
        "liger_note": liger.lines[-1] if liger.lines else "",
        "optimizer": type(optimizer).__name__,
        "optimizer_fused": bool(optimizer.defaults.get("fused")) if optimizer is not None else False,
        "gradient_checkpointing": any(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
        "torch_compile": _is_compiled(trainer.model_wrapped),
    }


def _liger_modules(model: nn.Module) -> int:
    """Modules whose forward pass is one of Liger's."""

    def is_patched(module: nn.Module) -> bool:
        forward = getattr(module.forward, "__func__", module.forward)
        forward = getattr(forward, "__wrapped__", forward)
        return "liger_kernel" in (getattr(forward, "__module__", "") or "") or "liger_kernel" in type(module).__module__

    return sum(is_patched(module) for module in model.modules())


def _is_compiled(model: nn.Module | None) -> bool:
    modules = model.modules() if model is not None else iter(())
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules)


def _tf32_rounds(device: torch.device) -> bool:
    """Whether an fp32 matrix product on this device loses the bits that TF32 drops (it keeps 10 of 23)."""
    if device.type != "cuda":
        return False
    finer_than_tf32 = 1 + 2.0**-13
    matrix = torch.full((256, 256), finer_than_tf32, device=device)
    product = matrix @ torch.eye(256, device=device)
    return bool((product != matrix).any().item())
