"""A text as samples: every row once an epoch, in an order that the seed alone decides."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import default_data_collator

#: How samples are ordered, as the evidence tells it.
ORDER = "shuffled by seed and epoch"

#: Of a batch, how many of its tokens are no padding: a number on the host, and no input of the model's.
REAL_TOKENS = "real_tokens"

# What no loss counts, as PyTorch's cross entropy has it.
_IGNORED = -100

# Between the seeds of two runs lie the seeds of all epochs of one.
_STRIDE = 1_000_003


class RowSource(Protocol):
    """Rows that are there, or made when they are taken."""

    is_costly: ClassVar[bool]
    """Whether each is made anew whenever it is taken."""

    def __len__(self) -> int: ...

    def take(self, row: int) -> tuple[np.ndarray, int | None]:
        """Its tokens, and how many of them are real; ``None``: all."""


class TextSamples(Dataset[dict[str, torch.Tensor]]):
    """``length`` samples: epoch after epoch of ``rows``, each in an order of its own.

    What sample 7 is depends on the seed and the rows, and not on how many samples are taken.
    """

    order = ORDER

    def __init__(self, rows: RowSource, *, length: int, seed: int, counts_padding: bool) -> None:
        self._rows, self._length, self._seed = rows, length, seed
        self._counts_padding = counts_padding
        self._orders: dict[int, torch.Tensor] = {}
        #: Whether a sample is made anew whenever it is asked for.
        self.is_costly = rows.is_costly
        #: The first samples, of which all others are repetitions.
        self.distinct = min(length, len(rows))

    def __len__(self) -> int:
        return self._length

    def row_of(self, index: int) -> int:
        """Which row sample ``index`` is."""
        epoch, place = divmod(index, len(self._rows))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed * _STRIDE + epoch)
            self._orders[epoch] = torch.randperm(len(self._rows), generator=generator)
        return int(self._orders[epoch][place])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.row_of(index)
        tokens, real = self._rows.take(row)
        ids = torch.from_numpy(tokens).long()
        if real is None:
            return {"input_ids": ids, "labels": ids}
        mask = torch.arange(len(ids)) < real
        labels = ids if self._counts_padding else ids.masked_fill(~mask, _IGNORED)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def counted(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A batch as transformers puts it together, and how many of its tokens are real, counted while the host has it."""
    batch = default_data_collator(samples)
    return {**batch, REAL_TOKENS: int(batch["attention_mask"].sum())}
