"""TrainingData: what a spec's launch trains on, made before anything is timed, and what there is to tell of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.worker.data import rows as rows_of
from pytest_llmperf.worker.data import token_cache
from pytest_llmperf.worker.data.byte_tokenizer import ByteTokenizer
from pytest_llmperf.worker.data.local_tokenizer import LocalTokenizer
from pytest_llmperf.worker.data.random_tokens import RandomTokens
from pytest_llmperf.worker.data.rows import Rows
from pytest_llmperf.worker.data.rows_on_the_fly import RowsOnTheFly
from pytest_llmperf.worker.data.text_reader import read
from pytest_llmperf.worker.data.text_samples import TextSamples, counted
from pytest_llmperf.worker.data.token_cache import Tokens
from pytest_llmperf.worker.refusal import RefusedError

#: Who has made a text tokens where nobody does while it trains.
AHEAD = "nobody, they were made ahead"

# Texts that are made tokens at a time.
_AT_ONCE = 1000


class Tokenizer(Protocol):
    """Of bytes, or the user's."""

    vocabulary_size: int
    end_of_text: int
    padding: int

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class TrainingData:
    """For the Trainer."""

    samples: Dataset[dict[str, torch.Tensor]]
    collator: Callable[[list[Any]], dict[str, Any]] | None = None
    """``None``: the Trainer's own."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was read, for the evidence; nothing of random tokens."""
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
            "tokenised_by": self.on_the_fly.made_by if self.on_the_fly else AHEAD,
        }


def training_data(spec: TrainSpec, steps: int, vocabulary_size: int) -> TrainingData:
    """What ``spec`` trains on in ``steps``, with a model of this vocabulary. Ranks meet here where there are several.

    Raises:
        RefusedError: a text that cannot be read, that does not suit the model, or that is too short.
    """
    # A step fetches the batch of the next one: the last step should too, as all before.
    length = spec.sequences_per_step * (steps + 1)
    if spec.data == "random":
        tokens = RandomTokens(
            length=length, sequence_length=spec.sequence_length, vocabulary_size=vocabulary_size, seed=spec.seed
        )
        return TrainingData(tokens)
    tokenizer = _tokenizer(spec)
    if tokenizer.vocabulary_size > vocabulary_size:
        raise RefusedError(
            f"the tokenizer {spec.tokenizer_files.slug} has {tokenizer.vocabulary_size} tokens, and {spec.model} a "
            f"vocabulary of {vocabulary_size}; expected a tokenizer with no more, the model's own say"
        )
    documents = _shared_tokens(spec, tokenizer)
    rows = _rows(spec, tokenizer, documents)
    _check_number(spec, documents, rows)
    counts_padding = spec.rows == "padded_in_loss"
    on_the_fly = _on_the_fly(spec, tokenizer, documents) if spec.tokenise == "on_the_fly" else None
    samples = TextSamples(on_the_fly or rows, length=length, seed=spec.seed, counts_padding=counts_padding)
    facts = {
        "text": spec.text_files.fingerprint,
        "split": spec.split,
        "tokenizer": spec.tokenizer_files.fingerprint,
        "rows": spec.rows,
        "num_documents": documents.num_documents,
        "num_rows": len(rows.ids),
        "num_tokens": rows.num_tokens,
        "num_tokens_left_out": rows.left_out,
    }
    return TrainingData(samples, counted if spec.has_padding else None, facts, len(rows), on_the_fly)


def _tokenizer(spec: TrainSpec) -> Tokenizer:
    path = spec.tokenizer_files.path
    return ByteTokenizer() if path is None else LocalTokenizer(path)


def _shared_tokens(spec: TrainSpec, tokenizer: Tokenizer) -> Tokens:
    """The text's tokens: kept from before, or made by the first rank, or by one that cannot read what that has left."""
    facts = {
        "text": spec.text_files.fingerprint,
        "format": spec.text_files.format,
        "split": spec.split,
        "tokenizer": spec.tokenizer_files.fingerprint,
        "special": spec.has_padding,
    }
    path = token_cache.path_of(facts)
    several = dist.is_initialized()
    tokens = None
    if not several or dist.get_rank() == 0:
        tokens = token_cache.kept(path)
        if tokens is None:
            tokens = _made(spec, tokenizer)
            token_cache.keep(path, tokens)
    if several:
        dist.barrier()
    return tokens or token_cache.kept(path) or _made(spec, tokenizer)


def _made(spec: TrainSpec, tokenizer: Tokenizer) -> Tokens:
    texts = read(spec.text_files)
    found: list[np.ndarray] = []
    for start in range(0, len(texts), _AT_ONCE):
        found += tokenizer.encode(texts[start : start + _AT_ONCE], special=spec.has_padding)
    return Tokens(np.concatenate(found), np.asarray([len(each) for each in found], dtype=np.int64))


def _rows(spec: TrainSpec, tokenizer: Tokenizer, documents: Tokens) -> Rows:
    if spec.rows == "packed":
        return rows_of.packed(documents, spec.sequence_length, tokenizer.end_of_text)
    return rows_of.padded(documents, spec.sequence_length, tokenizer.padding, keep_short=_keeps_short(spec))


def _on_the_fly(spec: TrainSpec, tokenizer: Tokenizer, documents: Tokens) -> RowsOnTheFly:
    """The same rows: which documents are long enough to be one is known by their tokens alone, made once before."""
    texts = read(spec.text_files)
    chosen = [texts[number] for number in rows_of.documents_in_rows(documents, keep_short=_keeps_short(spec))]
    return RowsOnTheFly(chosen, spec.sequence_length, tokenizer, num_workers=spec.data_workers)


def _keeps_short(spec: TrainSpec) -> bool:
    return spec.rows == "padded_in_loss"


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
