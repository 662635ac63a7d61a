"""The input pipeline, as data: who makes a text tokens and fetches its batches, of one model on padded rows.

The first case leaves all of it to the rank, between two steps; the others give it to workers, or make tokens ahead.
What is trained is the same, to the last digit of each loss, but for packed rows. Text and tokenizer are those of
``texts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from perf_tests.ladder import on_cpu
from perf_tests.texts import SPLIT, TEXT, tokenizer_of
from pytest_llmperf import TrainSpec

_MODEL = "llama-3.2-1b"

_BY_ITSELF = TrainSpec(
    model=_MODEL,
    data="text",
    text=TEXT,
    split=SPLIT,
    tokenizer=tokenizer_of(_MODEL),
    rows="padded",
    tokenise="on_the_fly",
    sequence_length=512,
    micro_batch_size=37,
    liger=True,
    steps=30,
    min_steps=12,
)

_STEPS: tuple[dict[str, Any], ...] = (
    {},
    {"data_workers": 2},
    {"data_workers": 4},
    {"data_workers": 4, "data_prefetch": 8},
    {"data_workers": 4, "data_pinned": False},
    {"tokenise": "ahead"},
    {"tokenise": "ahead", "rows": "packed"},
)
# With the tiny model a row's bytes are soon counted: what is told apart there is who has done it.
_STEPS_ON_CPU: tuple[dict[str, Any], ...] = ({}, {"data_workers": 2}, {"tokenise": "ahead"})


def _on_cpu() -> Iterator[TrainSpec]:
    small = {"micro_batch_size": 4, "liger": False, "text": None, "split": "train", "tokenizer": None}
    for step in _STEPS_ON_CPU:
        # Of long rows some of each batch have padding: each step runs the same operators, and can be traced.
        yield replace(on_cpu(replace(_BY_ITSELF, **{**small, **step})), sequence_length=512)


INPUT_PIPELINE = [replace(_BY_ITSELF, **step) for step in _STEPS]
INPUT_PIPELINE_ON_CPU = [*_on_cpu()]
