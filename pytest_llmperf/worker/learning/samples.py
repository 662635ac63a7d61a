"""Which samples of a data set a batch on the device holds, by what they say."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

# A data set of more would take longer to read than all else; those of a step follow one another in it.
_MOST_READ = 20_000

# What a model is given of each.
_OF_A_SAMPLE = ("input_ids", "labels", "attention_mask")


def row_digests(inputs: Mapping[str, torch.Tensor]) -> list[bytes]:
    """Of each sequence of a batch: its tokens, labels and mask, each of shape (sequences, tokens)."""
    on_host = {name: inputs[name].cpu() for name in _OF_A_SAMPLE if name in inputs}
    rows = range(len(on_host["input_ids"]))
    return [_digest({name: each[row] for name, each in on_host.items()}) for row in rows]


def found(digests: Sequence[bytes], dataset: Any, first: int, num: int) -> tuple[tuple[int, ...], frozenset[int]]:
    """The index of each in ``dataset``, -1 where it is not there, and which of these it has more than once.

    All of a small one is looked at; of a larger one, or of one whose samples are made anew each time, the ``num``
    samples from ``first`` on.
    """
    distinct = getattr(dataset, "distinct", None) or len(dataset)
    indices: Iterable[int] = range(distinct)
    if distinct > _MOST_READ or getattr(dataset, "is_costly", False):
        indices = range(first, min(first + num, len(dataset)))
    index_of: dict[bytes, int] = {}
    times: Counter[bytes] = Counter()
    for index in indices:
        digest = _digest(dataset[index])
        index_of.setdefault(digest, index)
        times[digest] += 1
    again = first // distinct != (first + num - 1) // distinct  # the step goes on with another epoch
    ambiguous = frozenset(index_of[digest] for digest in digests if digest in index_of and (again or times[digest] > 1))
    return tuple(index_of.get(digest, -1) for digest in digests), ambiguous


def _digest(sample: Mapping[str, torch.Tensor]) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for name in _OF_A_SAMPLE:
        if name in sample:
            hashed.update(name.encode() + sample[name].to(torch.int64).contiguous().numpy().tobytes())
    return hashed.digest()


def has_own_labels(inputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether each label is its own input, which the model's loss shifts, or is left out of the loss."""
    labels, tokens = inputs.get("labels"), inputs["input_ids"]
    return labels is not None and bool(((labels == tokens) | (labels == _LEFT_OUT)).all())


# transformers' word for a label that no loss counts.
_LEFT_OUT = -100
