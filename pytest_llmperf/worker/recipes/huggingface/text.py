"""A text as samples: every row once an epoch, in an order that the seed alone decides."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Protocol
from zipfile import BadZipFile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast, default_data_collator

from pytest_llmperf.settings.text_files import COLUMN, TextFiles
from pytest_llmperf.support.files import replacing
from pytest_llmperf.support.folders import cache_folder
from pytest_llmperf.worker.refusal import RefusedError

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


# The rows of a text, read by ``datasets`` from local files.


_NO_ROWS = "no rows there; expected some, {}: name another text or split"

# How datasets says that, of parquet and of an empty .txt.
_SAID_OF_NO_ROWS = ("corresponds to no data", "at least one example")


def read(text: TextFiles) -> list[str]:
    """Every row of the slice, empty ones too; of ``.txt`` files a row is a paragraph.

    Raises:
        RefusedError: what is there is no text, or no row of it, in one line.
    """
    try:
        import datasets  # noqa: PLC0415 - only texts need the package
    except ImportError as error:
        raise RefusedError(
            f"data='text' is read by datasets, which cannot be imported ({error}): pip install 'pytest-llmperf[text]'"
        ) from None
    name = _name(text)
    no_rows = _NO_ROWS.format("paragraphs" if text.format == "text" else f"in a column {COLUMN!r}")
    # A file without rows gives a reader of parquet no size of its own to read by.
    words = {"sample_by": "paragraph"} if text.format == "text" else {"batch_size": 10_000}
    try:
        datasets.disable_progress_bars()
        # Its own copies are of no use to anybody else: what comes of them, tokens, is kept.
        with tempfile.TemporaryDirectory(prefix="llmperf-text-") as folder:
            found = datasets.load_dataset(
                text.format,
                data_files={text.split.name: [str(path) for path in text.files]},
                split=text.split.words,
                cache_dir=folder,
                **words,
            )
            rows = _column(found, name)
    except RefusedError:
        raise
    except Exception as error:  # noqa: BLE001 - readers of many formats raise as many errors, in words of their own
        raise RefusedError(f"{name}: {_why(error, no_rows)}") from None
    if not rows:
        raise RefusedError(f"{name}: {no_rows}")
    if not any(map(str.strip, rows)):
        raise RefusedError(f"{name}: {len(rows)} rows, and nothing stands in any of them: name another text or split")
    return rows


def _column(found: Any, name: str) -> list[str]:
    if COLUMN not in found.column_names:
        there = ", ".join(map(repr, found.column_names)) or "none"
        raise RefusedError(
            f"{name}: no column {COLUMN!r}, expected one of that name; there: {there}; rename it, or name another text"
        )
    rows = ["" if row is None else row for row in found[COLUMN]]
    odd = next((row for row in rows if not isinstance(row, str)), None)
    if odd is not None:
        raise RefusedError(f"{name}: its column {COLUMN!r} holds {type(odd).__name__}, expected text")
    return rows


def _name(text: TextFiles) -> str:
    more = f" and {len(text.files) - 1} more" if len(text.files) > 1 else ""
    return f"text {text.files[0]}{more} ({text.split.words})"


def _why(error: BaseException, no_rows: str) -> str:
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, UnicodeDecodeError):
            where = f"no UTF-8 at byte {cause.start} ({cause.reason})"
            return f"{where}; expected text in UTF-8: convert it, or name another text"
    if any(words in str(cause) for cause in causes for words in _SAID_OF_NO_ROWS):
        return no_rows
    told = next((cause for cause in reversed(causes) if str(cause).strip()), error)
    return f"cannot be read ({' '.join(str(told).split())[:200]})"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# A tokenizer of the user's, from local files alone.


# How the families call it, where a bare tokenizer.json does not say which of its tokens that is.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class LocalTokenizer:
    """What transformers makes of the folder or file at a path.

    Raises:
        RefusedError: it makes nothing of it, or it has no token for the end of a text.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._own = _load(path)
        except Exception as error:  # noqa: BLE001 - a tokenizer's own code may raise anything
            reason = " ".join(str(error).split())
            raise RefusedError(
                f"tokenizer {path}: transformers cannot load it ({type(error).__name__}: {reason[:200]}); expected a "
                "folder as save_pretrained writes it, or a tokenizer.json"
            ) from None
        known = self._own.get_vocab()
        #: One more than the largest token.
        self.vocabulary_size: int = max(known.values(), default=-1) + 1
        own_end = self._own.eos_token_id
        end = own_end if own_end is not None else next((known[name] for name in _ENDS if name in known), None)
        if end is None:
            raise RefusedError(
                f"tokenizer {path}: it names no token that ends a text; expected eos_token in its tokenizer_config.json"
            )
        self.end_of_text: int = end
        padding = self._own.pad_token_id
        # As the courses do; what is padding is told by where it is.
        self.padding: int = end if padding is None else padding

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]:
        """The tokens of each; ``special``: with those that the tokenizer puts around a text by itself."""
        found = self._own(list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, dtype=np.int32) for ids in found["input_ids"]]


def _load(path: Path) -> Any:
    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


# The tokenizer that needs no file: a token for each byte, one for the end of a text, one for padding.


_END_OF_TEXT, _PADDING = 256, 257


class ByteTokenizer:
    """UTF-8, byte by byte."""

    vocabulary_size = 258
    end_of_text = _END_OF_TEXT
    padding = _PADDING

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]:  # noqa: ARG002 - it has none
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]


# The tokens of a text, kept in the user's cache: what two launches share is made once.


@dataclass(frozen=True)
class Tokens:
    """Those of all documents, one after the other."""

    ids: np.ndarray
    lengths: np.ndarray
    """Of each document; none of an empty one that nothing stands for."""

    @property
    def num_documents(self) -> int:
        return len(self.lengths)


def path_of(facts: dict[str, Any]) -> Path:
    """Of the file that keeps the tokens that ``facts`` are all about, under today's versions."""
    by = {name: _version(name) for name in ("datasets", "tokenizers", "transformers")}
    key = hashlib.sha256(json.dumps({**facts, **by}, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("tokens") / f"{key}.npz"


def kept(path: Path) -> Tokens | None:
    """What ``path`` holds; ``None`` where it is not there, or none of ours: it can be made anew."""
    try:
        with np.load(path) as arrays:
            found = Tokens(arrays["ids"], arrays["lengths"])
    except (OSError, ValueError, LookupError, EOFError, BadZipFile):
        return None
    return found if len(found.ids) == int(found.lengths.sum()) else None


def keep(path: Path, tokens: Tokens) -> None:
    """Leave ``tokens`` whole or not at all; a cache that cannot be written costs the next launch their making."""
    with suppress(OSError), replacing(path, lasts=False) as file:
        np.savez(file, ids=tokens.ids, lengths=tokens.lengths)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
