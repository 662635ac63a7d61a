"""Training on a text, as data: the chapter's first and last steps, and more GPUs, after lab 10 of the course.

``LLMPERF_TEXT`` names the text (a folder of parquet, as ``wikitext-2-raw-v1``), else the small one that ships here is
read; ``LLMPERF_TOKENIZERS`` a folder with a tokenizer for each model by its name, else bytes are tokens. The lab's rows
are texts of 512 tokens with padding counted in the loss; the sound ones beside them are packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from perf_tests.ladder import on_cpu
from perf_tests.texts import SPLIT, TEXT, tokenizer_of
from pytest_llmperf import TrainSpec

#: How the lab makes its rows, and how they should be made.
ROWS = ("packed", "padded_in_loss")

_NAIVE: dict[str, Any] = {"model_precision": "fp32", "mixed_precision": "no", "attention": "eager", "steps": 20}
# The lab's micro-batches of OPT, and the chapter's of Llama.
_SIZES = {"llama-3.2-1b": (6, 37), "opt-1.3b": (5, 16)}
# Of the lab's runs on one GPU, tokens/s: padding among them, as it is among ours.
_PUBLISHED = {"opt-1.3b": (15_600.0, 58_390.0)}
_WIDTHS = (2, 4)
_WIDTHS_ON_CPU = (2,)


@dataclass(frozen=True)
class TextCase:
    """One training."""

    spec: TrainSpec
    inactive: tuple[str, ...] = ()
    """Settings that are asked for and change nothing for this model."""
    published: float | None = None
    """Tokens/s of the lab's run, of which weights and tokenizer were others."""


def _of(model: str, rows: str) -> Iterator[TextCase]:
    naive, optimised = _SIZES[model]
    base = TrainSpec(
        model=model,
        data="text",
        text=TEXT,
        split=SPLIT,
        tokenizer=tokenizer_of(model),
        rows=rows,
        sequence_length=512,
        steps=30,
        min_steps=12,
    )
    # Liger has no kernels for OPT: asked for, as the lab does, and declared to change nothing.
    inactive = ("liger",) if model == "opt-1.3b" else ()
    slow, fast = _PUBLISHED.get(model, (None, None)) if rows == "padded_in_loss" else (None, None)
    yield TextCase(replace(base, micro_batch_size=naive, **_NAIVE), published=slow)
    best = replace(base, micro_batch_size=optimised, liger=True)
    yield TextCase(best, inactive, fast)
    yield from (TextCase(replace(best, gpus=gpus), inactive) for gpus in _WIDTHS)


def _on_cpu(rows: str) -> Iterator[TextCase]:
    """The same steps with the tiny model, and without what needs a GPU."""
    naive, best, *_ = (case.spec for case in _of("llama-3.2-1b", rows))
    small: dict[str, Any] = {"micro_batch_size": 4, "liger": False, "text": None, "split": "train", "tokenizer": None}
    yield TextCase(on_cpu(replace(naive, **small)))
    yield from (TextCase(on_cpu(replace(best, **small, gpus=gpus))) for gpus in (1, *_WIDTHS_ON_CPU))


def _apart(cases: Iterator[TextCase], **other: Any) -> Iterator[TextCase]:
    """The optimised one on a GPU, where no token sees another document's."""
    _, best, *_ = (case.spec for case in cases)
    yield from (TextCase(replace(best, rows=rows, **other)) for rows in ("packed_apart", "padding_free"))


REAL_DATA = [case for rows in ROWS for model in _SIZES for case in _of(model, rows)]
# Kernels for sequences of several lengths; SDPA takes a mask.
REAL_DATA += [*_apart(_of("llama-3.2-1b", "packed"), attention="flash_attention_2")]
REAL_DATA_ON_CPU = [case for rows in ROWS for case in _on_cpu(rows)] + [*_apart(_on_cpu("packed"))]
