"""Sums over tensors that a rank holds, of their bits or their squares: each is read once, and nothing is copied.

What they are of is a local shard where weights are sharded. All sums of a model are fetched together, with one wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# Whole numbers of as many bytes.
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are to be trained, each once, with its name in the model."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of ``tensor`` this rank holds."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bit_sums(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Of each, its elements' bits as whole numbers of their width, modulo 2**64; 0 of what is not there.

    Where one element alone is another, so is the sum.
    """
    return list(map(int, _fetched([None if each is None else _bits(local(each)) for each in tensors])))


def square_sums(tensors: Sequence[torch.Tensor | None]) -> list[float]:
    """Of each, the sum of squares, to seven digits; 0 of what is not there."""
    norms = [
        None if each is None else torch.linalg.vector_norm(local(each), dtype=torch.float32).double()
        for each in tensors
    ]
    return [norm**2 for norm in _fetched(norms)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.contiguous().view(-1).view(_WHOLE[tensor.element_size()])
    return whole.sum(dtype=torch.int64)


def _fetched(sums: Sequence[torch.Tensor | None]) -> list[Any]:
    there = [each for each in sums if each is not None]
    found = iter(torch.stack(there).tolist() if there else ())
    return [0 if each is None else next(found) for each in sums]


# Of each tensor: enough that one of them is updated as the others are.
_SAMPLED = 256


def sample(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Some elements of each at equal distances, one behind the other; the same ones each time."""
    flat = [local(each).reshape(-1) for each in tensors]
    return torch.cat([each[:: max(1, each.numel() // _SAMPLED)][:_SAMPLED].float() for each in flat])


def sampled(tensor: torch.Tensor) -> int:
    """How many elements of it a sample has."""
    numel = local(tensor).numel()
    return min(_SAMPLED, -(-numel // max(1, numel // _SAMPLED))) if numel else 0
