"""Padded rows whose tokens are made when they are taken, by whoever takes them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from torch.utils.data import get_worker_info


class Encoder(Protocol):
    """What of a tokenizer is needed."""

    @property
    def padding(self) -> int: ...

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]: ...


class RowsOnTheFly:
    """A document a row, cut off at ``length`` tokens or filled up to it: the rows of ``rows.padded``.

    Documents are bytes of one array, and no objects: a worker that only looks at an object writes to its page, and
    would have a copy of all of them in the end.
    """

    is_costly: ClassVar[bool] = True

    def __init__(self, documents: Sequence[str], length: int, tokenizer: Encoder, *, num_workers: int) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in documents]
        self._text = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
        self._length, self._tokenizer = length, tokenizer
        # Of the rank, then of each worker: memory that a fork shares, and of which each writes its own number.
        self._made = np.frombuffer(mmap.mmap(-1, 8 * (1 + num_workers)), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, row: int) -> tuple[np.ndarray, int]:
        """Its tokens, and how many of them are real."""
        start = int(self._ends[row - 1]) if row else 0
        text = self._text[start : int(self._ends[row])].tobytes().decode("utf-8", "surrogatepass")
        (found,) = self._tokenizer.encode([text], special=True)
        real = min(len(found), self._length)
        ids: np.ndarray = np.full(self._length, self._tokenizer.padding, dtype=np.int32)
        ids[:real] = found[:real]
        worker = get_worker_info()
        self._made[0 if worker is None else 1 + worker.id] += 1
        return ids, real

    @property
    def made_by(self) -> str:
        """Who has made documents tokens: ``rank``, ``workers``, both, or ``nobody``."""
        who = {"rank": self._made[0], "workers": self._made[1:].sum()}
        return " and ".join(name for name, number in who.items() if number) or "nobody"
