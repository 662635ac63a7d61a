"""Initial weights of a small training: the same values, to the last bit, in every precision and on every device."""

from __future__ import annotations

from functools import lru_cache

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
    parameters = list(model.parameters())
    drawn = _drawn(seed, tuple(parameter.shape for parameter in parameters))
    with torch.no_grad():
        for parameter, values in zip(parameters, drawn, strict=True):
            if parameter.ndim > 1:
                wide = values * parameter.shape[-1] ** -0.5
            else:
                wide = parameter.detach().float().cpu() + _SPREAD * values
            parameter.copy_(_in_all_types(wide))


@lru_cache(maxsize=1)  # several trainings in turn are of one seed
def _drawn(seed: int, shapes: tuple[torch.Size, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _in_all_types(values: torch.Tensor) -> torch.Tensor:
    # What fp16's range and bf16's digits both hold, wider types hold too.
    return values.to(torch.float16).to(torch.bfloat16).float()
