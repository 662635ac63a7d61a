"""TrainingData: what a launch trains on, random tokens or a text from local files, made before anything is timed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast, default_data_collator

from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.attention import FLASH
from pytest_llmperf.settings.data import COLUMN, TextFiles, has_document_a_row, is_apart, is_uneven, paragraphs, too_few
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import cache_folder, hashed, replacing
from pytest_llmperf.worker.warm.agent import die_with


def read(text: TextFiles) -> list[str]:
    """Every row of the slice, empty ones too; of ``.txt`` files a row is a paragraph. RefusedError: no text or row."""
    parts, rows, before, path = list[tuple[Path, int, Callable[[], list[str]]]](), list[str](), 0, text.files[0]
    try:
        for path in text.files:
            parts += [(path, *part) for part in _parts(path)]
        chosen = text.split.of(sum(number for _, number, _ in parts))
        for path, number, rows_of in parts:  # noqa: B007 - an error names it
            first, last = max(0, chosen.start - before), min(number, chosen.stop - before)
            rows += rows_of()[first:last] if first < last else []
            before += number
    except (OSError, ValueError, NotImplementedError) as error:  # Arrow's are made of these
        raise RefusedError(f"text {path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    if not any(map(str.strip, rows)):
        where = f"text {text.files[0]} ({text.split.words})"
        raise RefusedError(f"{where}: nothing stands in its {len(rows)} rows; name another text or split")
    return rows


def _parts(path: Path) -> Iterator[tuple[int, Callable[[], list[str]]]]:
    """What of a file is read at once: how many rows, and how. Of parquet its groups of rows."""
    if path.suffix == ".txt":
        rows = [*paragraphs(path)]
        yield len(rows), lambda: rows
        return
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - only parquet needs the package

    file = ParquetFile(path)
    if COLUMN not in (names := file.schema_arrow.names):
        raise ValueError(f"it has no column {COLUMN!r}, expected one of that name; there: {', '.join(names)}")
    for group in range(file.num_row_groups):
        yield file.metadata.row_group(group).num_rows, partial(_group, file, group)


def _group(file: Any, group: int) -> list[str]:
    rows = ["" if row is None else row for row in file.read_row_group(group, [COLUMN])[COLUMN].to_pylist()]
    if odd := next((type(row).__name__ for row in rows if not isinstance(row, str)), ""):
        raise ValueError(f"its column {COLUMN!r} holds {odd}, expected text")
    return rows


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
    chosen = np.flatnonzero(tokens.lengths >= (0 if keep_short else 2))  # of one token alone none is predicted
    lengths = np.minimum(tokens.lengths[chosen], length)
    ids: np.ndarray = np.full((len(chosen), length), padding, dtype=np.int32)
    for row, (start, number) in enumerate(zip(starts[chosen], lengths, strict=True)):
        ids[row, :number] = tokens.ids[start : start + number]
    return Rows(ids, lengths, int(tokens.lengths.sum() - lengths.sum()))


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
        rows: Rows,
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
        #: The first samples, of which all others are repetitions.
        self.distinct = min(length, len(rows.ids))

    def __len__(self) -> int:
        return self._length

    def row_of(self, index: int) -> int:
        epoch, place = divmod(index, len(self._rows.ids))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed * _STRIDE + epoch)
            last = dict([*self._orders.items()][-1:])  # of all epochs of hours it would be a leak
            self._orders = {**last, epoch: torch.randperm(len(self._rows.ids), generator=generator)}
        return int(self._orders[epoch][place])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row, lengths = self.row_of(index), self._rows.lengths
        ids, real = torch.from_numpy(self._rows.ids[row]).long(), None if lengths is None else int(lengths[row])
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

    def evidence(self, num_samples: int) -> dict[str, Any]:
        """After ``num_samples`` over all ranks."""
        if not self.facts:
            return {}
        return {
            "data": dict(self.facts),
            "epochs": round(num_samples / self.facts["num_rows"], 6),
            "tokenised_by": "nobody, they were made ahead",
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
    if why := too_few(spec, len(rows.ids), f"{len(documents.ids)} in {documents.num_documents} texts"):
        raise RefusedError(why)
    end = None if has_document_a_row(spec) else tokenizer.end_of_text
    positions = partial(since, end_of_text=end) if is_apart(spec) else None
    samples = TextSamples(rows, length=number, seed=spec.seed, counts_padding=counts_padding, positions=positions)
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
    return TrainingData(samples, collator, facts)


def _sources(spec: TrainSpec) -> dict[str, Any]:
    return {"text": spec.text_files.fingerprint, "split": spec.split, "tokenizer": spec.tokenizer_files.fingerprint}


def _shared_tokens(spec: TrainSpec, tokenizer: Tokenizer) -> Tokens:
    """The text's tokens: kept from before, or made by the first rank, or by one that cannot read what that has left."""
    facts: dict[str, Any] = {**_sources(spec), "special": has_document_a_row(spec)}
    facts |= {name: version(name) for name in ("tokenizers", "transformers")}
    path = cache_folder("tokens") / f"{hashed(json.dumps(facts, sort_keys=True))}.npz"
    several = dist.is_initialized()
    is_first = not several or dist.get_rank() == 0
    tokens = kept(path) if is_first else None
    if is_first and tokens is None:
        tokens = _made(spec, tokenizer)
        # Whole or not at all; a cache that cannot be written costs the next launch their making.
        with suppress(OSError), replacing(path, lasts=False) as file:
            np.savez(file, ids=tokens.ids, lengths=tokens.lengths)
    if several:
        dist.barrier()
    return tokens or kept(path) or _made(spec, tokenizer)


def _made(spec: TrainSpec, tokenizer: Tokenizer) -> Tokens:
    texts = read(spec.text_files)
    found: list[np.ndarray] = []
    for start in range(0, len(texts), _AT_ONCE):
        found += tokenizer.encode(texts[start : start + _AT_ONCE], special=has_document_a_row(spec))
    return Tokens(np.concatenate(found), np.asarray([len(each) for each in found], dtype=np.int64))


def bind_workers(loader: Any) -> None:
    """Let the workers that ``loader`` forks later end with this process: one with a batch to hand over never looks."""
    own = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
    if own.num_workers:
        own.worker_init_fn = partial(_begin_worker, os.getpid(), own.worker_init_fn)


def _begin_worker(rank: int, own: Callable[[int], None] | None, number: int) -> None:
    die_with(rank, signal.SIGKILL)
    if own is not None:
        own(number)
