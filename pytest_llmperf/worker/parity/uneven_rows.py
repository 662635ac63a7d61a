"""What a small training is trained on: rows of unequal length, since equal ones hide how losses are averaged."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

# What a row is filled up with, and what its labels say there: it is no part of the loss.
_PADDING, _IGNORED = 0, -100

# One row in so many is full.
_FULL = 4


class UnevenRows(Dataset[dict[str, torch.Tensor]]):
    """``length`` rows of random tokens, one in four of them full and the others down to an eighth as long.

    No attention mask: in a causal model nothing that counts sees padding that follows it, and a mask would call for
    other kernels than the measured training has.
    """

    def __init__(self, *, length: int, sequence_length: int, vocabulary_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._rows = []
        for number in range(length):
            tokens = torch.randint(vocabulary_size, (sequence_length,), generator=generator)
            shortest = max(2, sequence_length // 8)
            counted = int(torch.randint(shortest, sequence_length + 1, (), generator=generator))
            labels = tokens.clone()
            if number % _FULL:
                tokens[counted:], labels[counted:] = _PADDING, _IGNORED
            self._rows.append({"input_ids": tokens, "labels": labels})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index]
