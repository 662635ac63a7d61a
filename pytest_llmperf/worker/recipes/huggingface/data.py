"""TrainingData: what a spec's launch trains on, made before anything is timed, and what there is to tell of it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, get_worker_info
from transformers import default_data_collator

from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.folder import RefusedError
from pytest_llmperf.worker.recipes.huggingface import token_files
from pytest_llmperf.worker.recipes.huggingface.token_files import ByteTokenizer, LocalTokenizer, Tokenizer, Tokens, read

# Between the seeds of two runs lie the seeds of all samples, or epochs, of one.
_STRIDE = 1_000_003

# A causal model predicts the next token: one alone has none.
_LEAST = 2


@dataclass(frozen=True)
class Rows:
    """Samples are taken from these."""

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


class RowsOnTheFly:
    """A document a row, cut off at ``length`` tokens or filled up to it: the rows of ``padded``.

    Documents are bytes of one array, and no objects: a worker that only looks at an object writes to its page, and
    would have a copy of all of them in the end.
    """

    is_costly: ClassVar[bool] = True

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
        who = {"rank": self._made[0], "workers": self._made[1:].sum()}
        return " and ".join(name for name, number in who.items() if number) or "nobody"


#: Of a batch, how many of its tokens are no padding: a number on the host, and no input of the model's.
REAL_TOKENS = "real_tokens"

# What no loss counts, as PyTorch's cross entropy has it.
_IGNORED = -100

# Texts that are made tokens at a time.
_AT_ONCE = 1000


class TextSamples(Dataset[dict[str, torch.Tensor]]):
    """``length`` samples: epoch after epoch of ``rows``, each in an order of its own.

    What sample 7 is depends on the seed and the rows, and not on how many samples are taken.
    """

    #: How they are ordered, as the evidence tells it.
    order = "shuffled by seed and epoch"

    def __init__(self, rows: Rows | RowsOnTheFly, *, length: int, seed: int, counts_padding: bool) -> None:
        self._rows, self._length, self._seed, self._counts_padding = rows, length, seed, counts_padding
        self._orders: dict[int, torch.Tensor] = {}
        #: Whether a sample is made anew whenever it is asked for.
        self.is_costly = rows.is_costly
        #: The first samples, of which all others are repetitions.
        self.distinct = min(length, len(rows))

    def __len__(self) -> int:
        return self._length

    def row_of(self, index: int) -> int:
        epoch, place = divmod(index, len(self._rows))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed * _STRIDE + epoch)
            self._orders[epoch] = torch.randperm(len(self._rows), generator=generator)
        return int(self._orders[epoch][place])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, real = self._rows.take(self.row_of(index))
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


# Sequences that really differ. More would only cost start-up time and host memory.
_POOL = 512


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """``length`` sequences of ``sequence_length`` token ids, uniform over the vocabulary; labels are the inputs.

    The chapter trains on such: speed does not depend on what tokens say.
    """

    #: How they are drawn and ordered, as the evidence tells it. Records that tell of another way, or of none (until
    #: November 2026 order and schedule depended on the number of steps), are not compared by their losses.
    order = "by index"

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
    """Make what ``spec`` trains on in ``steps``, with a model of this vocabulary. Several ranks meet here.

    Raises:
        RefusedError: a text that cannot be read, that does not suit the model, or that is too short.
    """
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
    if spec.rows == "packed":
        rows = packed(documents, length, tokenizer.end_of_text)
    else:
        rows = padded(documents, length, tokenizer.padding, keep_short=counts_padding)
    _check_number(spec, documents, rows)
    on_the_fly = None
    if spec.tokenise == "on_the_fly":  # which documents are long enough to be a row is known by their tokens alone
        texts = read(spec.text_files)
        chosen = [texts[number] for number in documents_in_rows(documents, keep_short=counts_padding)]
        on_the_fly = RowsOnTheFly(chosen, length, tokenizer, num_workers=spec.data_workers)
    samples = TextSamples(on_the_fly or rows, length=number, seed=spec.seed, counts_padding=counts_padding)
    facts = {
        **_sources(spec),
        "rows": spec.rows,
        "num_documents": documents.num_documents,
        "num_rows": len(rows.ids),
        "num_tokens": rows.num_tokens,
        "num_tokens_left_out": rows.left_out,
    }
    return TrainingData(samples, counted if spec.has_padding else None, facts, len(rows), on_the_fly)


def _sources(spec: TrainSpec) -> dict[str, Any]:
    return {
        "text": spec.text_files.fingerprint,
        "split": spec.split,
        "tokenizer": spec.tokenizer_files.fingerprint,
    }


def _shared_tokens(spec: TrainSpec, tokenizer: Tokenizer) -> Tokens:
    """The text's tokens: kept from before, or made by the first rank, or by one that cannot read what that has left."""
    facts = {**_sources(spec), "format": spec.text_files.format, "special": spec.has_padding}
    path = token_files.path_of(facts)
    several = dist.is_initialized()
    tokens = None
    if not several or dist.get_rank() == 0:
        tokens = token_files.kept(path)
        if tokens is None:
            tokens = _made(spec, tokenizer)
            token_files.keep(path, tokens)
    if several:
        dist.barrier()
    return tokens or token_files.kept(path) or _made(spec, tokenizer)


def _made(spec: TrainSpec, tokenizer: Tokenizer) -> Tokens:
    texts = read(spec.text_files)
    found: list[np.ndarray] = []
    for start in range(0, len(texts), _AT_ONCE):
        found += tokenizer.encode(texts[start : start + _AT_ONCE], special=spec.has_padding)
    return Tokens(np.concatenate(found), np.asarray([len(each) for each in found], dtype=np.int64))


def _check_number(spec: TrainSpec, documents: Tokens, rows: Rows) -> None:
    """A step whose samples are not all different is none of an epoch."""
    if len(rows.ids) >= spec.sequences_per_step:
        return
    batch = f"{spec.micro_batch_size} x {spec.gradient_accumulation_steps} accumulated x {spec.gpus} ranks"
    raise RefusedError(
        f"the text gives {len(rows.ids)} rows of {spec.sequence_length} tokens (it has {len(documents.ids)} in "
        f"{documents.num_documents} texts), and a step takes {spec.sequences_per_step} ({batch}); expected enough for "
        "one step: take more of the text, shorter rows or a smaller batch"
    )
