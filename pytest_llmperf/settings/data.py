"""Data: what a training reads, how a text becomes rows, and who fetches them; weights: what it begins from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_llmperf.settings.setting import Evidence, Package, Setting, TrainSpec, at_default, claimed, equal

DATA = ("random", "text")
#: How a text becomes rows of ``sequence_length``: one stream cut into ``packed`` ones, of which a token sees all before
#: it, or, ``packed_apart``, its own document alone; or a document a row, ``padded`` with what counts in no loss, or, as
#: many a course has it, with padding that counts like any other token; ``padding_free``: a batch's documents in one.
ROWS = ("packed", "packed_apart", "padded", "padded_in_loss", "padding_free")
PADDED, _APART = ("padded", "padded_in_loss"), ("packed_apart", "padding_free")
#: The fields that say which text, and how it is read.
OF_A_TEXT = ("text", "split", "tokenizer", "rows")

_FIELDS = ("data", *OF_A_TEXT, "tokenise", "data_workers", "data_prefetch", "data_pinned")


def _problems(spec: TrainSpec) -> Iterator[str]:
    if spec.data == "text":
        try:
            _ = spec.text_files.fingerprint, spec.tokenizer_files.fingerprint
        except OSError as error:
            yield f"TrainSpec: {error.filename}: cannot be read ({error.strerror})"
    elif spec.data in DATA:
        # Where no text is asked for, what says which one changes nothing, and would look as if it did.
        for name in (*OF_A_TEXT, "tokenise"):
            if getattr(spec, name) != getattr(type(spec), name):
                yield f"TrainSpec: {name}={getattr(spec, name)!r} without data='text' changes nothing"


def is_apart(spec: TrainSpec) -> bool:
    """Whether positions begin anew with each document, of which no token sees another one."""
    return spec.data == "text" and spec.rows in _APART


def is_uneven(spec: TrainSpec) -> bool:
    """Whether a step has as many tokens as its documents."""
    return spec.data == "text" and spec.rows == "padding_free"


def has_document_a_row(spec: TrainSpec) -> bool:
    return spec.has_padding or is_uneven(spec)


def _clash(spec: TrainSpec) -> str | None:
    if spec.data_prefetch is not None and not spec.data_workers:
        return f"data_prefetch={spec.data_prefetch} without data_workers changes nothing: only workers fetch ahead"
    if spec.tokenise == "on_the_fly" and not has_document_a_row(spec):
        return (
            "packed rows are cut from the tokens of all documents, so none can be made on the fly; use rows='padded', "
            "'padded_in_loss' or 'padding_free', or tokenise='ahead'"
        )
    return None


_PINNED = "batches are pinned for copies to a GPU, and a CPU makes none"
_DATASETS = Package("datasets", "datasets, which reads texts", "'pytest-llmperf[text]'", preload="text")


@dataclass(frozen=True)
class DataEvidence:
    """What was read, and who fetched it."""

    data: Mapping[str, Any] | None = None
    """Of a text what it says and how it was cut; random tokens tell nothing."""
    epochs: float | None = None
    tokenised_by: str | None = None
    """``rank`` or ``workers``: on the fly by these. Records that do not tell had all tokens ahead."""
    data_workers: int = 0
    data_prefetch: int | None = field(default=None, metadata={"null": 0})
    data_pinned: bool = True
    documents: str | None = None
    """Of rows whose documents should not see one another: ``apart``, ``mixed``, or ``unknown``: it was not tried."""


def _data(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = evidence.data.data
    if spec.data == "random":
        return None if seen is None else f"asked for random tokens, the run read the text {seen.get('text')}"
    asked = {
        "text": spec.text_files.fingerprint,
        "split": spec.split,
        "tokenizer": spec.tokenizer_files.fingerprint,
        "rows": spec.rows,
    }
    read = claimed(seen, "data")
    if is_apart(spec) and claimed(evidence.data.documents, "documents") == "mixed":
        return f"asked for rows {spec.rows}, and tokens saw those of other documents"
    return next((line for name in asked if (line := equal(f"the data's {name}", asked[name], read.get(name)))), None)


def _data_workers(spec: TrainSpec, evidence: Evidence) -> str | None:
    line = equal("data workers", spec.data_workers, evidence.data.data_workers)
    if line or spec.data_prefetch is None:
        return line
    return equal("a prefetch of", spec.data_prefetch, evidence.data.data_prefetch or None)


def _tokenised(spec: TrainSpec, evidence: Evidence) -> str | None:
    """By the process that fetches, and by no other."""
    by = evidence.data.tokenised_by or ""
    fetching = "workers" if spec.data_workers else "rank"
    if spec.tokenise == "on_the_fly":
        return None if by == fetching else f"asked for tokens on the fly by the {fetching}, made by {by or 'nobody'}"
    makers = {"rank", "workers"} & {*by.split()}
    return f"asked for tokens ahead, made on the fly by the {by}" if makers else None


SETTING = Setting(
    name="data",
    fields=_FIELDS,
    # A text is made tokens before anything is timed, or each row as it is fetched.
    values={"data": DATA, "rows": ROWS, "tokenise": ("ahead", "on_the_fly")},
    least={"data_workers": 0, "data_prefetch": 1},
    in_id={
        "data": "{}",
        "text": lambda spec: "" if spec.text is None else spec.text_files.slug,
        "split": lambda spec: "" if spec.split == type(spec).split else spec.text_files.split.slug,
        "tokenizer": lambda spec: "" if spec.tokenizer is None else spec.tokenizer_files.slug,
        "rows": "{}",
        "tokenise": "{}",
        "data_workers": "workers{}",
        "data_prefetch": "prefetch{}",
        "data_pinned": "unpinned",
    },
    problems=_problems,
    clash=_clash,
    why_not_on_cpu=lambda spec: None if spec.data_pinned else _PINNED,
    needs=lambda spec: _DATASETS if spec.data == "text" else None,
    small=at_default(*_FIELDS),
    evidence=DataEvidence,
    checks={"data": _data, "data_workers": _data_workers, "data_pinned": "pinned batches", "tokenise": _tokenised},
    moot_on_cpu=frozenset({"data_pinned"}),
)


# Weights: what a training begins from, and whether it saves what it came to.

# numpy, which the Trainer seeds too, takes no larger one.
_SEEDS = 2**32
# Of a small spec the next ones are taken too.
_LAST_SMALL_SEED = _SEEDS - 64


def _weights_problems(spec: TrainSpec) -> Iterator[str]:
    try:
        is_folder = spec.weights is None or bool(spec.weights and Path(spec.weights).is_dir())
    except OSError:  # too long a name, or a parent that may not be read
        is_folder = False
    if not is_folder:
        yield f"TrainSpec: weights={spec.weights!r} names no folder, expected one as save_pretrained writes it"


@dataclass(frozen=True)
class WeightsEvidence:
    """What was saved."""

    checkpoint_bytes: int | None = None
    """Of the checkpoint that the Trainer wrote; records of launches that wrote none do not tell."""


def _saved(spec: TrainSpec, evidence: Evidence) -> str | None:
    return equal("save_checkpoint", spec.save_checkpoint, bool(evidence.weights.checkpoint_bytes))


WEIGHTS = Setting(
    name="weights",
    fields=("weights", "seed", "save_checkpoint"),
    in_id={"weights": "pretrained", "seed": "seed{}", "save_checkpoint": "saves"},
    problems=_weights_problems,
    clash=lambda spec: None if 0 <= spec.seed < _SEEDS else f"seed={spec.seed} must be at least 0 and below 2**32",
    small=lambda spec: {"weights": None, "save_checkpoint": False, "seed": min(spec.seed, _LAST_SMALL_SEED)},
    evidence=WeightsEvidence,
    checks={"save_checkpoint": _saved},
)
