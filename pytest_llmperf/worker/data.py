"""What is trained on: random tokens, as the chapter does; speed does not depend on what they say."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

# Sequences that really differ. More would only cost start-up time and host memory.
_POOL = 512


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """``length`` sequences of ``sequence_length`` token ids, uniform over the vocabulary; labels are the inputs."""

    def __init__(self, *, length: int, sequence_length: int, vocabulary_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (min(length, _POOL), sequence_length)
        self._tokens = torch.randint(vocabulary_size, shape, generator=generator)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index % len(self._tokens)]
        return {"input_ids": tokens, "labels": tokens}
