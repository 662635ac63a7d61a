"""Rows of one length, cut from a text's tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pytest_llmperf.worker.data.token_cache import Tokens

# A causal model predicts the next token: one alone has none.
_LEAST = 2


@dataclass(frozen=True)
class Rows:
    """What a sample is taken from."""

    ids: np.ndarray
    """Tokens, a row each."""
    lengths: np.ndarray | None
    """How many of a row's tokens are real; ``None``: all of all rows."""
    left_out: int
    """Tokens that are in no row: beyond a row's length, of a document too short, or of the stream's end."""

    is_costly: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, row: int) -> tuple[np.ndarray, int | None]:
        """Its tokens, and how many of them are real; ``None``: all."""
        return self.ids[row], None if self.lengths is None else int(self.lengths[row])

    @property
    def num_tokens(self) -> int:
        """Real ones, in all rows."""
        return int(self.ids.size if self.lengths is None else self.lengths.sum())


def packed(tokens: Tokens, length: int, end_of_text: int) -> Rows:
    """One stream, cut every ``length`` tokens: documents, each followed by the end of a text.

    A row's tokens see those before them in the row, whichever document they are of.
    """
    documents = np.split(tokens.ids, np.cumsum(tokens.lengths)[:-1]) if tokens.num_documents else []
    end = np.asarray([end_of_text], dtype=np.int32)
    stream = np.concatenate([part for document in documents if len(document) for part in (document, end)] or [end[:0]])
    number = len(stream) // length
    return Rows(stream[: number * length].reshape(number, length), None, len(stream) - number * length)


def padded(tokens: Tokens, length: int, padding: int, *, keep_short: bool) -> Rows:
    """A document a row, cut off at ``length`` or filled up to it.

    ``keep_short``: also those in which there is nothing to predict, down to empty ones.
    """
    starts = np.cumsum(tokens.lengths) - tokens.lengths
    chosen = documents_in_rows(tokens, keep_short=keep_short)
    lengths = np.minimum(tokens.lengths[chosen], length)
    ids: np.ndarray = np.full((len(chosen), length), padding, dtype=np.int32)
    for row, (start, number) in enumerate(zip(starts[chosen], lengths, strict=True)):
        ids[row, :number] = tokens.ids[start : start + number]
    return Rows(ids, lengths, int(tokens.lengths.sum() - lengths.sum()))


def documents_in_rows(tokens: Tokens, *, keep_short: bool) -> np.ndarray:
    """The numbers of those that ``padded`` makes a row of, in their order."""
    return np.arange(tokens.num_documents) if keep_short else np.flatnonzero(tokens.lengths >= _LEAST)
