"""A text from local files, made tokens; without a network, and once for all launches that share it."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pytest_llmperf.settings.text_files import COLUMN, TextFiles
from pytest_llmperf.support.files import replacing
from pytest_llmperf.support.folders import cache_folder
from pytest_llmperf.worker.folder import RefusedError

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
    more = f" and {len(text.files) - 1} more" if len(text.files) > 1 else ""
    name = f"text {text.files[0]}{more} ({text.split.words})"
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


def _why(error: BaseException, no_rows: str) -> str:
    causes: list[BaseException] = []
    one: BaseException | None = error
    while one is not None:
        causes.append(one)
        one = one.__cause__ or one.__context__
    wrong = next((cause for cause in causes if isinstance(cause, UnicodeDecodeError)), None)
    if wrong is not None:
        where = f"no UTF-8 at byte {wrong.start} ({wrong.reason})"
        return f"{where}; expected text in UTF-8: convert it, or name another text"
    if any(words in str(cause) for cause in causes for words in _SAID_OF_NO_ROWS):
        return no_rows
    last = next((cause for cause in reversed(causes) if str(cause).strip()), error)
    return f"cannot be read ({' '.join(str(last).split())[:200]})"


class Tokenizer(Protocol):
    vocabulary_size: int
    end_of_text: int
    padding: int

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]:
        """The tokens of each; ``special``: with those that the tokenizer puts around a text by itself."""


# How the families call it, where a bare tokenizer.json does not say which of its tokens that is.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class LocalTokenizer:
    """The user's: what transformers makes of the folder or file at a path.

    Raises:
        RefusedError: it makes nothing of it, or it has no token for the end of a text.
    """

    def __init__(self, path: Path) -> None:
        try:
            if path.is_file():
                self._own: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
            else:
                self._own = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
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
        found = self._own(list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, dtype=np.int32) for ids in found["input_ids"]]


class ByteTokenizer:
    """The one that needs no file: a token for each byte of UTF-8, one for the end of a text, one for padding."""

    vocabulary_size, end_of_text, padding = 258, 256, 257

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]:  # noqa: ARG002 - it has none
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]


@dataclass(frozen=True)
class Tokens:
    """Those of all documents, one after the other."""

    ids: np.ndarray
    lengths: np.ndarray
    """One for each document."""

    @property
    def num_documents(self) -> int:
        return len(self.lengths)


def path_of(facts: dict[str, Any]) -> Path:
    """The file that keeps the tokens that ``facts`` are all about, under today's versions, for launches to come."""
    facts = dict(facts)
    for name in ("datasets", "tokenizers", "transformers"):
        facts[name] = ""
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("tokens") / f"{key}.npz"


def kept(path: Path) -> Tokens | None:
    """Return what ``path`` holds; ``None`` where it is not there, or none of ours: it can be made anew."""
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
