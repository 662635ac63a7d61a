"""What is trained on: random tokens, as the chapter does; speed does not depend on what they say.

A sample is a function of the seed and its index alone, and samples are taken in the order of their indices: what a
launch trains on does not depend on how many steps it takes, so that two launches of one spec can be compared loss by
loss.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

#: How samples are drawn and ordered, as the evidence tells it. Records that tell of another way, or of none (until
#: November 2026 order and schedule depended on the number of steps), are not compared by their losses.
ORDER = "by index"

# Sequences that really differ. More would only cost start-up time and host memory.
_POOL = 512

# Between the seeds of two runs lie the seeds of all samples of one.
_STRIDE = 1_000_003


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """``length`` sequences of ``sequence_length`` token ids, uniform over the vocabulary; labels are the inputs."""

    order = ORDER

    def __init__(self, *, length: int, sequence_length: int, vocabulary_size: int, seed: int) -> None:
        generator = torch.Generator()
        rows = [
            torch.randint(vocabulary_size, (sequence_length,), generator=generator.manual_seed(seed * _STRIDE + index))
            for index in range(min(length, _POOL))
        ]
        self._tokens = torch.stack(rows)
        self._length = length
        #: The first samples, of which all others are repetitions.
        self.distinct = len(rows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index % _POOL]
        return {"input_ids": tokens, "labels": tokens}
