"""Weights as FSDP gathers them under mixed precision: fp32 for the optimizer, 16 bits wherever they are used."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

_ADDED = "parametrizations"
_WRAPPERS = frozenset({_ADDED, "_orig_mod", "_checkpoint_wrapped_module"})


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.to(self._dtype)


def as_gathered(model: nn.Module, dtype: torch.dtype) -> None:
    """Let ``model`` compute with copies of its parameters in ``dtype``; the plain form of what FSDP does."""
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            parametrize.register_parametrization(module, name, _Cast(dtype), unsafe=True)  # another type comes out


def plain_name(name: str) -> str:
    """A parameter's name without what wraps it, or what makes it another type."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[:-1] if _ADDED in name and parts[-1] == "original" else parts)
