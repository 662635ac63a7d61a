"""Initial weights of a small training: the same values, to the last bit, in every precision and on every device."""

from __future__ import annotations

import torch
from torch import nn

# Of what multiplies or is added element by element: around what the model begins it with.
_SPREAD = 0.1


def set_initial_weights(model: nn.Module, seed: int) -> None:
    """Give each parameter of ``model`` values that depend on ``seed`` and the parameters' order alone.

    Matrices keep what passes through them at its size, which a model's own initialisation does not at these widths:
    attention would look everywhere alike, and whatever is wrong with it would hardly show. What begins as one or zero
    differs from element to element, so that it matters which of them is used where.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                drawn *= parameter.shape[-1] ** -0.5
            else:
                drawn = parameter.detach().float().cpu() + _SPREAD * drawn
            parameter.copy_(_in_all_types(drawn))


def _in_all_types(values: torch.Tensor) -> torch.Tensor:
    # What fp16's range and bf16's digits both hold, wider types hold too.
    return values.to(torch.float16).to(torch.bfloat16).float()
