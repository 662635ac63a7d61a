"""Chapter 15 as data: the rungs of tables 15.1 to 15.9 and the widths of 15.10 to 15.12, for both models, as published.

Published figures are of MareNostrum 5 ACC (H100 64 GB, PyTorch container 24.07): the chapter's tables for Llama 3.2 1B,
the slides of lab 10 for OPT 1.3B.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_llmperf.insight.ladder import Rung
from pytest_llmperf.records.result import Reference
from pytest_llmperf.spec.train_spec import TrainSpec, precision_fields
from pytest_llmperf.support.units import GIB

CHAPTER = "chapter 15, MareNostrum 5 (H100 64 GB)"
LAB = "lab 10, MareNostrum 5 (H100 64 GB)"

#: Steps of each published run.
STEPS = 450

#: What makes the published figures and ours differ besides the machine.
NOTES = (
    "published: steps x batch x length / train_runtime, the first step included; ours: the median steady step",
    "published fp32 may use TF32, which that container allows; ours is true fp32",
)


def _spec(model: str, precision: str, attention: str, micro_batch_size: int, **more: Any) -> TrainSpec:
    fields = precision_fields(precision)
    return TrainSpec(model=model, **fields, attention=attention, micro_batch_size=micro_batch_size, **more)


def _llama(precision: str, attention: str, micro_batch_size: int, **more: Any) -> TrainSpec:
    return _spec("llama-3.2-1b", precision, attention, micro_batch_size, **more)


def _opt(precision: str, attention: str, micro_batch_size: int, **more: Any) -> TrainSpec:
    return _spec("opt-1.3b", precision, attention, micro_batch_size, **more)


def _published(source: str, tokens_per_second_per_gpu: float, peak_reserved_gib: float) -> Reference:
    return Reference(
        source=source,
        tokens_per_second_per_gpu=tokens_per_second_per_gpu,
        peak_reserved_bytes=peak_reserved_gib * GIB,
    )


_OUT_OF_MEMORY = Reference(source=CHAPTER, tokens_per_second_per_gpu=None)

LLAMA = (
    Rung("15.1", _llama("fp32", "eager", 6), _published(CHAPTER, 10485, 61.89)),
    Rung("15.2", _llama("fp32", "eager", 7), _OUT_OF_MEMORY),
    Rung("15.3", _llama("bf16-mixed", "eager", 5), _published(CHAPTER, 11489, 58.27)),
    Rung("15.4", _llama("bf16", "eager", 5), _published(CHAPTER, 13520, 47.66)),
    Rung("15.5", _llama("bf16", "eager", 7), _published(CHAPTER, 14315, 61.32)),
    Rung("15.5", _llama("bf16", "eager", 8), _OUT_OF_MEMORY),
    Rung("15.6", _llama("bf16", "sdpa", 7), _published(CHAPTER, 24446, 39.27)),
    Rung("15.7", _llama("bf16", "sdpa", 14), _published(CHAPTER, 27669, 60.89)),
    Rung("15.8", _llama("bf16", "sdpa", 14, liger=True), _published(CHAPTER, 36479, 32.46)),
    Rung("15.9", _llama("bf16", "sdpa", 37, liger=True), _published(CHAPTER, 48081, 62.33)),
)

# The slides publish OPT's first rung and its best one; the steps between are the chapter's, with batches of ours.
OPT = (
    Rung("15.1", _opt("fp32", "eager", 4), _published(LAB, 7601.89, 57.6)),
    Rung("15.2", _opt("fp32", "eager", 5)),
    Rung("15.3", _opt("bf16-mixed", "eager", 4)),
    Rung("15.4", _opt("bf16", "eager", 4)),
    Rung("15.5", _opt("bf16", "eager", 6)),
    Rung("15.6", _opt("bf16", "sdpa", 6)),
    Rung("15.7", _opt("bf16", "sdpa", 16), _published(LAB, 33544.73, 59.11)),
    Rung("15.8", _opt("bf16", "sdpa", 16, liger=True)),
    Rung("15.9", _opt("bf16", "sdpa", 32, liger=True)),
)

LADDERS = (LLAMA, OPT)

#: GPUs of tables 15.10 to 15.12.
WIDTHS = (1, 2, 4, 8, 16, 32)


def _widths(spec: TrainSpec, published: dict[int, Reference]) -> tuple[Rung, ...]:
    return tuple(Rung("15.10", replace(spec, gpus=gpus), published.get(gpus)) for gpus in WIDTHS)


# The chapter's tables are Llama's; of OPT the slides of lab 10 have one GPU and 32.
LLAMA_WIDTHS = _widths(
    _llama("bf16", "sdpa", 37, liger=True),
    {
        1: _published(CHAPTER, 48229, 62.34),
        2: _published(CHAPTER, 46188, 62.21),
        4: _published(CHAPTER, 43432, 61.97),
        8: _published(CHAPTER, 42297, 62.13),
        16: _published(CHAPTER, 41869, 61.99),
        32: _published(CHAPTER, 41424, 61.99),
    },
)
OPT_WIDTHS = _widths(
    _opt("bf16", "sdpa", 16),
    {
        1: _published(LAB, 33544.73, 59.11),
        32: Reference(source=LAB, tokens_per_second_per_gpu=29026),
    },
)

SCALINGS = (LLAMA_WIDTHS, OPT_WIDTHS)
