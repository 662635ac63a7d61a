"""TrainingData: what a launch trains on, random tokens or a text from local files, made before anything is timed."""

from __future__ import annotations

import hashlib
import json
import mmap
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, get_worker_info
from transformers import AutoTokenizer, PreTrainedTokenizerFast, default_data_collator

from pytest_llmperf.settings.attention import FLASH
from pytest_llmperf.settings.data import has_document_a_row, is_apart, is_uneven
from pytest_llmperf.settings.text_files import COLUMN, TextFiles
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import cache_folder, replacing
from pytest_llmperf.worker.folder import RefusedError

_NO_ROWS = "no rows there; expected some, {}: name another text or split"

# How datasets says that, of parquet and of an empty .txt.
_SAID_OF_NO_ROWS = ("corresponds to no data", "at least one example")


def read(text: TextFiles) -> list[str]:
    """Every row of the slice, empty ones too; of ``.txt`` files a row is a paragraph. RefusedError: no text or row."""
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
        with tempfile.TemporaryDirectory(prefix="llmperf-text-") as at:
            files = {text.split.name: [str(path) for path in text.files]}
            found = datasets.load_dataset(text.format, data_files=files, split=text.split.words, cache_dir=at, **words)
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


# How the families call it, where a bare tokenizer.json does not say which of its tokens ends a text.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class LocalTokenizer:
    """What transformers makes of the user's folder or file; a ``RefusedError`` where nothing ends a text."""

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
        self.vocabulary_size: int = max(known.values(), default=-1) + 1
        end = self._own.eos_token_id
        end = next((known[name] for name in _ENDS if name in known), None) if end is None else end
        if end is None:
            raise RefusedError(
                f"tokenizer {path}: it names no token that ends a text; expected eos_token in its tokenizer_config.json"
            )
        self.end_of_text: int = end
        padding = self._own.pad_token_id
        self.padding: int = end if padding is None else padding  # what is padding is told by where it is

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]:
        """The tokens of each; ``special``: with those that the tokenizer puts around a text by itself."""
        found = self._own(list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, dtype=np.int32) for ids in found["input_ids"]]


class ByteTokenizer:
    """The one that needs no file: a token for each byte of UTF-8, one for the end of a text, one for padding."""

    vocabulary_size, end_of_text, padding = 258, 256, 257

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]:  # noqa: ARG002 - it has none
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]


Tokenizer: TypeAlias = LocalTokenizer | ByteTokenizer


@dataclass(frozen=True)
class Tokens:
    """Those of all documents, one after the other."""

    ids: np.ndarray
    lengths: np.ndarray
    """One for each document."""

    @property
    def num_documents(self) -> int:
        return len(self.lengths)


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


# Between the seeds of two runs lie the seeds of all samples, or epochs, of one.
_STRIDE = 1_000_003


@dataclass(frozen=True)
class Rows:
    ids: np.ndarray
    """Tokens, a row each."""
    lengths: np.ndarray | None
    """How many of a row's tokens are real; ``None``: all of all rows."""
    left_out: int
    """Tokens that are in no row: beyond a row's length, of a document too short, or of the stream's end."""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, row: int) -> tuple[np.ndarray, int | None]:
        """Its tokens, and how many of them are real; ``None``: all."""
        return self.ids[row], None if self.lengths is None else int(self.lengths[row])

    @property
    def num_tokens(self) -> int:
        return int(self.ids.size if self.lengths is None else self.lengths.sum())


def packed(tokens: Tokens, length: int, end_of_text: int) -> Rows:
    """One stream, cut every ``length`` tokens: documents, each followed by the end of a text."""
    documents = np.split(tokens.ids, np.cumsum(tokens.lengths)[:-1]) if tokens.num_documents else []
    end = np.asarray([end_of_text], dtype=np.int32)
    stream = np.concatenate([part for document in documents if len(document) for part in (document, end)] or [end[:0]])
    number = len(stream) // length
    return Rows(stream[: number * length].reshape(number, length), None, len(stream) - number * length)


def padded(tokens: Tokens, length: int, padding: int, *, keep_short: bool) -> Rows:
    """A document a row, cut off at ``length`` or filled up to it; ``keep_short``: also where nothing is predicted."""
    starts = np.cumsum(tokens.lengths) - tokens.lengths
    chosen = documents_in_rows(tokens, keep_short=keep_short)
    lengths = np.minimum(tokens.lengths[chosen], length)
    ids: np.ndarray = np.full((len(chosen), length), padding, dtype=np.int32)
    for row, (start, number) in enumerate(zip(starts[chosen], lengths, strict=True)):
        ids[row, :number] = tokens.ids[start : start + number]
    return Rows(ids, lengths, int(tokens.lengths.sum() - lengths.sum()))


def documents_in_rows(tokens: Tokens, *, keep_short: bool) -> np.ndarray:
    """The numbers of those that ``padded`` makes a row of, in their order."""
    least = 0 if keep_short else 2  # a causal model predicts the next token: one alone has none
    return np.flatnonzero(tokens.lengths >= least)


class RowsOnTheFly:
    """The rows of ``padded``. Documents are bytes of one array: a worker that looks at objects copies their pages."""

    def __init__(self, documents: Sequence[str], length: int, tokenizer: Tokenizer, *, num_workers: int) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in documents]
        self._text = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
        self._length, self._tokenizer = length, tokenizer
        # Of the rank, then of each worker: memory that a fork shares, and of which each writes its own number.
        self._made = np.frombuffer(mmap.mmap(-1, 8 * (1 + num_workers)), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, row: int) -> tuple[np.ndarray, int]:
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
        who = {"rank": self._made[0], "workers": self._made[1:].sum()}
        return " and ".join(name for name, number in who.items() if number) or "nobody"


#: Of a batch, how many of its tokens are no padding: a number on the host, and no input of the model's.
REAL_TOKENS = "real_tokens"

# What no loss counts, as PyTorch's cross entropy has it; and how many texts are made tokens at a time.
_IGNORED, _AT_ONCE = -100, 1000


class TextSamples(Dataset[dict[str, torch.Tensor]]):
    """``length`` samples: epoch after epoch of ``rows``; what sample 7 is depends on the seed and the rows alone."""

    #: How they are ordered, as the evidence tells it.
    order = "shuffled by seed and epoch"

    def __init__(
        self,
        rows: Rows | RowsOnTheFly,
        *,
        length: int,
        seed: int,
        counts_padding: bool,
        positions: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """``positions``: of the tokens of a row whose documents do not see one another."""
        self._rows, self._length, self._seed, self._counts_padding = rows, length, seed, counts_padding
        self._positions = positions
        self._orders: dict[int, torch.Tensor] = {}
        self.is_costly = isinstance(rows, RowsOnTheFly)  # a sample is made anew whenever it is asked for
        #: The first samples, of which all others are repetitions.
        self.distinct = min(length, len(rows))

    def __len__(self) -> int:
        return self._length

    def row_of(self, index: int) -> int:
        epoch, place = divmod(index, len(self._rows))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed * _STRIDE + epoch)
            last = dict([*self._orders.items()][-1:])  # of all epochs of hours it would be a leak
            self._orders = {**last, epoch: torch.randperm(len(self._rows), generator=generator)}
        return int(self._orders[epoch][place])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, real = self._rows.take(self.row_of(index))
        ids = torch.from_numpy(tokens).long()
        if self._positions:
            at = self._positions(ids := ids[:real])
            return {"input_ids": ids, "labels": ids.masked_fill(at == 0, _IGNORED), "position_ids": at}
        if real is None:
            return {"input_ids": ids, "labels": ids}
        mask = torch.arange(len(ids)) < real
        labels = ids if self._counts_padding else ids.masked_fill(~mask, _IGNORED)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def since(ids: torch.Tensor, end_of_text: int | None) -> torch.Tensor:
    """How many tokens of its document are before each, in this row; ``end_of_text`` is what ends one in its middle."""
    places = torch.arange(len(ids))
    if end_of_text is None:
        return places
    begins = torch.cat([torch.ones(1, dtype=torch.bool), ids[:-1] == end_of_text])
    return places - torch.where(begins, places, 0).cummax(0).values


def counted(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A batch as transformers puts it together, and how many of its tokens are real, counted while the host has it."""
    batch = default_data_collator(samples)
    tokens = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
    return {**batch, REAL_TOKENS: int(tokens)}


def flattened(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A batch as one row: kernels for sequences of several lengths find where each begins by its positions."""
    return counted([{name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}])


def unflattened(spec: TrainSpec, batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The samples that a ``batch`` was made of."""
    if "position_ids" in batch and len(batch["input_ids"]) == 1:
        (places,) = (batch["position_ids"][0] == 0).nonzero(as_tuple=True)
        length = int(batch["input_ids"].numel())
        starts = places.tolist() if is_uneven(spec) else [*range(0, length, spec.sequence_length)]
        spans = zip(starts, [*starts[1:], length], strict=True)
        return [{name: each[0, start:end] for name, each in batch.items()} for start, end in spans]
    return [{name: each[row] for name, each in batch.items()} for row in range(len(batch["input_ids"]))]


_POOL = 512  # sequences that really differ: more would only cost start-up time and host memory


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """``length`` sequences of ``sequence_length`` token ids, uniform over the vocabulary; labels are the inputs."""

    #: How they are drawn and ordered, as the evidence tells it. Records that tell of another way, or of none (until
    #: November 2026 order and schedule depended on the number of steps), are not compared by their losses.
    order = "by index"

    def __init__(self, *, length: int, sequence_length: int, vocabulary_size: int, seed: int) -> None:
        self._length, self.distinct = length, min(length, _POOL)
        seeds = (torch.Generator().manual_seed(seed * _STRIDE + index) for index in range(self.distinct))
        rows = [torch.randint(vocabulary_size, (sequence_length,), generator=generator) for generator in seeds]
        self._tokens = torch.stack(rows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index % _POOL]
        return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class TrainingData:
    samples: Dataset[dict[str, torch.Tensor]]
    collator: Callable[[list[Any]], dict[str, Any]] | None = None
    """``None``: the Trainer's own."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Evidence of what was read; empty for random tokens."""
    num_rows: int = 0
    """Of one epoch; 0 where there are none."""
    on_the_fly: RowsOnTheFly | None = None
    """Rows that are made tokens as they are fetched, where some are."""

    def evidence(self, num_samples: int) -> dict[str, Any]:
        """After ``num_samples`` over all ranks."""
        if not self.facts:
            return {}
        return {
            "data": dict(self.facts),
            "epochs": round(num_samples / self.num_rows, 6),
            "tokenised_by": self.on_the_fly.made_by if self.on_the_fly else "nobody, they were made ahead",
        }


def training_data(spec: TrainSpec, steps: int, vocabulary_size: int) -> TrainingData:
    """What ``spec`` trains on in ``steps``; ranks meet here; RefusedError: a text is unreadable, unfit or too short."""
    # A step fetches the batch of the next one: the last step should too, as all before.
    number, length = spec.sequences_per_step * (steps + 1), spec.sequence_length
    if spec.data == "random":
        random = RandomTokens(length=number, sequence_length=length, vocabulary_size=vocabulary_size, seed=spec.seed)
        return TrainingData(random)
    path = spec.tokenizer_files.path
    tokenizer: Tokenizer = ByteTokenizer() if path is None else LocalTokenizer(path)
    if tokenizer.vocabulary_size > vocabulary_size:
        raise RefusedError(
            f"the tokenizer {spec.tokenizer_files.slug} has {tokenizer.vocabulary_size} tokens, and {spec.model} a "
            f"vocabulary of {vocabulary_size}; expected a tokenizer with no more, the model's own say"
        )
    documents = _shared_tokens(spec, tokenizer)
    counts_padding = spec.rows == "padded_in_loss"
    if not has_document_a_row(spec):
        rows = packed(documents, length, tokenizer.end_of_text)
    else:
        rows = padded(documents, length, tokenizer.padding, keep_short=counts_padding)
    if len(rows.ids) < spec.sequences_per_step:  # a step whose samples are not all different is none of an epoch
        batch = f"{spec.micro_batch_size} x {spec.gradient_accumulation_steps} accumulated x {spec.gpus} ranks"
        raise RefusedError(
            f"the text gives {len(rows.ids)} rows of {length} tokens (it has {len(documents.ids)} in "
            f"{documents.num_documents} texts), and a step takes {spec.sequences_per_step} ({batch}); expected enough "
            "for one step: take more of the text, shorter rows or a smaller batch"
        )
    on_the_fly = None
    if spec.tokenise == "on_the_fly":  # which documents are long enough to be a row is known by their tokens alone
        texts = read(spec.text_files)
        chosen = [texts[number] for number in documents_in_rows(documents, keep_short=counts_padding)]
        on_the_fly = RowsOnTheFly(chosen, length, tokenizer, num_workers=spec.data_workers)
    end = None if has_document_a_row(spec) else tokenizer.end_of_text
    positions = partial(since, end_of_text=end) if is_apart(spec) else None
    samples = TextSamples(
        on_the_fly or rows, length=number, seed=spec.seed, counts_padding=counts_padding, positions=positions
    )
    facts = {
        **_sources(spec),
        "rows": spec.rows,
        "num_documents": documents.num_documents,
        "num_rows": len(rows.ids),
        "num_tokens": rows.num_tokens,
        "num_tokens_left_out": rows.left_out,
    }
    # flash-attn looks for documents in a batch of one row alone.
    is_flat = is_uneven(spec) or (is_apart(spec) and spec.attention in FLASH)
    collator = flattened if is_flat else None if spec.rows == "packed" else counted
    return TrainingData(samples, collator, facts, len(rows), on_the_fly)


def _sources(spec: TrainSpec) -> dict[str, Any]:
    return {"text": spec.text_files.fingerprint, "split": spec.split, "tokenizer": spec.tokenizer_files.fingerprint}


def _shared_tokens(spec: TrainSpec, tokenizer: Tokenizer) -> Tokens:
    """The text's tokens: kept from before, or made by the first rank, or by one that cannot read what that has left."""
    facts: dict[str, Any] = {**_sources(spec), "format": spec.text_files.format, "special": has_document_a_row(spec)}
    for name in ("datasets", "tokenizers", "transformers"):
        facts[name] = ""
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder("tokens") / f"{key}.npz"
    several = dist.is_initialized()
    tokens = None
    if not several or dist.get_rank() == 0:
        tokens = kept(path)
        if tokens is None:
            tokens = _made(spec, tokenizer)
            keep(path, tokens)
    if several:
        dist.barrier()
    return tokens or kept(path) or _made(spec, tokenizer)


def _made(spec: TrainSpec, tokenizer: Tokenizer) -> Tokens:
    texts = read(spec.text_files)
    found: list[np.ndarray] = []
    for start in range(0, len(texts), _AT_ONCE):
        found += tokenizer.encode(texts[start : start + _AT_ONCE], special=has_document_a_row(spec))
    return Tokens(np.concatenate(found), np.asarray([len(each) for each in found], dtype=np.int64))
