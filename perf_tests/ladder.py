"""The ladder of chapter 15 as data: each rung is one optimisation step of tables 15.1 to 15.9, for both models.

Published figures are of MareNostrum 5 ACC (H100 64 GB, PyTorch container 24.07): the chapter's tables for Llama 3.2 1B,
the slides of lab 10 for OPT 1.3B. They are shown beside ours and gate nothing: that container lets fp32 matrix
products use TF32, which is why its fp32 rungs are faster than true fp32 on the same chip.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pytest_llmperf import TrainSpec
from pytest_llmperf.spec import PRECISIONS

CHAPTER = "chapter 15, MareNostrum 5 (H100 64 GB)"
LAB = "lab 10, MareNostrum 5 (H100 64 GB)"
CARD_GIB = 64

# True fp32 takes a second a step and is steady to 0.1 %: fewer steps say as much.
_SLOW = {"steps": 20, "min_steps": 12}


@dataclass(frozen=True)
class Rung:
    """One row of the chapter's tables."""

    number: str
    spec: TrainSpec
    published: dict[str, Any] | None = None
    """Arguments of the ``reference`` marker."""
    oom_on_the_card: bool = False
    """Whether it ran out of memory on the chapter's 64 GB card."""
    inactive: tuple[str, ...] = field(default=())
    """Settings that are asked for and change nothing for this model."""

    def on_cpu(self) -> Rung:
        """The same step with the tiny model of its family."""
        return replace(self, spec=on_cpu(self.spec), published=None)


def on_cpu(spec: TrainSpec) -> TrainSpec:
    """``spec`` with the tiny model of its family, short."""
    tiny = {"llama-3.2-1b": "llama-tiny", "opt-1.3b": "opt-tiny"}[spec.model]
    return replace(spec, model=tiny, sequence_length=64, steps=12, min_steps=12)


def _spec(model: str, precision: str, attention: str, micro_batch_size: int, **more: Any) -> TrainSpec:
    model_precision, mixed_precision, tf32 = PRECISIONS[precision]
    return TrainSpec(
        model=model,
        model_precision=model_precision,
        mixed_precision=mixed_precision,
        tf32=tf32,
        attention=attention,
        micro_batch_size=micro_batch_size,
        **more,
    )


def _llama(precision: str, attention: str, micro_batch_size: int, **more: Any) -> TrainSpec:
    return _spec("llama-3.2-1b", precision, attention, micro_batch_size, **more)


def _opt(precision: str, attention: str, micro_batch_size: int, **more: Any) -> TrainSpec:
    return _spec("opt-1.3b", precision, attention, micro_batch_size, **more)


def _published(source: str, tokens_per_second_per_gpu: float | None, peak_reserved_gib: float | None) -> dict[str, Any]:
    return {
        "source": source,
        "tokens_per_second_per_gpu": tokens_per_second_per_gpu,
        "peak_reserved_gib": peak_reserved_gib,
    }


LLAMA = [
    Rung("15.1", _llama("fp32", "eager", 6, **_SLOW), _published(CHAPTER, 10485, 61.89)),
    Rung("15.2", _llama("fp32", "eager", 7, **_SLOW), _published(CHAPTER, None, None), oom_on_the_card=True),
    Rung("15.3", _llama("bf16-mixed", "eager", 5), _published(CHAPTER, 11489, 58.27)),
    Rung("15.4", _llama("bf16", "eager", 5), _published(CHAPTER, 13520, 47.66)),
    Rung("15.5", _llama("bf16", "eager", 7), _published(CHAPTER, 14315, 61.32)),
    Rung("15.5", _llama("bf16", "eager", 8), _published(CHAPTER, None, None), oom_on_the_card=True),
    Rung("15.6", _llama("bf16", "sdpa", 7), _published(CHAPTER, 24446, 39.27)),
    Rung("15.7", _llama("bf16", "sdpa", 14), _published(CHAPTER, 27669, 60.89)),
    Rung("15.8", _llama("bf16", "sdpa", 14, liger=True), _published(CHAPTER, 36479, 32.46)),
    Rung("15.9", _llama("bf16", "sdpa", 37, liger=True), _published(CHAPTER, 48081, 62.33)),
]

# The slides publish OPT's first rung and its best one; the steps between are the chapter's, with batches of ours.
OPT = [
    Rung("15.1", _opt("fp32", "eager", 4, **_SLOW), _published(LAB, 7601.89, 57.6)),
    Rung("15.2", _opt("fp32", "eager", 5, **_SLOW)),
    Rung("15.3", _opt("bf16-mixed", "eager", 4)),
    Rung("15.4", _opt("bf16", "eager", 4)),
    Rung("15.5", _opt("bf16", "eager", 6)),
    Rung("15.6", _opt("bf16", "sdpa", 6)),
    Rung("15.7", _opt("bf16", "sdpa", 16), _published(LAB, 33544.73, 59.11)),
    # Liger has no kernels for OPT: asked for, as the chapter does, and declared to change nothing.
    Rung("15.8", _opt("bf16", "sdpa", 16, liger=True), inactive=("liger",)),
    Rung("15.9", _opt("bf16", "sdpa", 32, liger=True), inactive=("liger",)),
]

LADDER = LLAMA + OPT
