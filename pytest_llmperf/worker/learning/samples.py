"""Which samples of a data set a batch on the device holds, by what they say."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Read:
    """What of a data set was read in a step, by indices; of samples that are alike, the first one's."""

    samples: tuple[int, ...]
    """-1: one that is not there."""
    expected: tuple[int, ...]
    """Of all ranks, if samples are taken in their order."""
    ambiguous: frozenset[int]
    """Those of the samples that the data set has more than once."""


def found(digests: Sequence[bytes], dataset: Any, first: int, num: int) -> Read:
    """``digests`` as indices of ``dataset``, beside the ``num`` from ``first`` on, which the step should have.

    All of a small one is looked at; of a larger one, or of one whose samples are made anew each time, those alone.
    """
    distinct = getattr(dataset, "distinct", None) or len(dataset)
    expected = range(first, min(first + num, len(dataset)))
    is_long = distinct > _MOST_READ or getattr(dataset, "is_costly", False)
    index_of: dict[bytes, int] = {}
    times: Counter[bytes] = Counter()
    by_index: dict[int, bytes] = {}
    for index in expected if is_long else range(distinct):
        digest = by_index[index] = _digest(dataset[index])
        index_of.setdefault(digest, index)
        times[digest] += 1
    again = first // distinct != (first + num - 1) // distinct  # the step goes on with another epoch
    ambiguous = frozenset(index_of[digest] for digest in digests if digest in index_of and (again or times[digest] > 1))
    # Where an epoch is over, samples are those of another order.
    due = (by_index.get(index) or _digest(dataset[index]) for index in expected)
    return Read(
        tuple(index_of.get(digest, -1) for digest in digests), tuple(index_of.get(each, -1) for each in due), ambiguous
    )


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
