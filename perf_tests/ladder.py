"""The ladder of chapter 15 as cases: each rung of ``pytest_llmperf.analysis.ladder``, and how it is measured.

The published figures gate nothing: that container lets fp32 matrix products use TF32, which is why its fp32 rungs are
faster than true fp32 on the same chip.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pytest_llmperf import GIB, Reference, TrainSpec
from pytest_llmperf.analysis import ladder
from pytest_llmperf.analysis.ladder import Rung as Step


@dataclass(frozen=True)
class Rung:
    """One row of the chapter's tables."""

    number: str
    spec: TrainSpec
    published: dict[str, Any] | None = None
    """Arguments of the ``reference`` marker."""
    inactive: tuple[str, ...] = field(default=())
    """Settings that are asked for and change nothing for this model."""

    def on_cpu(self) -> Rung:
        """The same step with the tiny model of its family."""
        return replace(self, spec=on_cpu(self.spec), published=None)


# By transformers' word for the family.
_TINY = {
    "gemma3_text": "gemma-3-tiny",
    "gpt2": "gpt2-tiny",
    "llama": "llama-tiny",
    "mistral": "mistral-tiny",
    "mixtral": "mixtral-tiny",
    "opt": "opt-tiny",
    "qwen3": "qwen3-tiny",
}


def on_cpu(spec: TrainSpec) -> TrainSpec:
    """``spec`` with the tiny model of its family, short."""
    return replace(
        spec, model=_TINY[spec.architecture.model_type], sequence_length=64, steps=12, min_steps=12, warmup_steps=4
    )


# OPT 1.3B at the chapter's largest micro-batch, not compiled, reserves 82.6 GiB; tensors of Llama 1B at the one of an
# H200's fastest cases take 83.4 GiB and more, compiled or not. Each rank has all of it.
_OOM_GIB, _OPT_SEQUENCES, _LLAMA_SEQUENCES = 83.0, 32, 90


def oom_below_gib(spec: TrainSpec) -> float | None:
    """On which GPUs the suite's case runs out of memory, as was measured."""
    large = {"opt-1.3b": not spec.torch_compile and spec.micro_batch_size >= _OPT_SEQUENCES}
    large["llama-3.2-1b"] = spec.micro_batch_size >= _LLAMA_SEQUENCES
    return _OOM_GIB if spec.parallelism == "ddp" and large.get(spec.model) else None


def _case(rung: Step) -> Rung:
    # Liger has no kernels for OPT: asked for, as the chapter does, and declared to change nothing.
    is_inactive = rung.spec.liger and rung.spec.architecture.model_type == "opt"
    return Rung(
        rung.number,
        _measured(rung.spec),
        published=_marker(rung.reference),
        inactive=("liger",) if is_inactive else (),
    )


def _measured(spec: TrainSpec) -> TrainSpec:
    # True fp32 takes a second a step and is steady to 0.1 % from the second one on: fewer steps say as much.
    return replace(spec, steps=20, min_steps=6, warmup_steps=1) if spec.precision == "fp32" else spec


def _marker(reference: Reference | None) -> dict[str, Any] | None:
    if reference is None:
        return None
    num_bytes = reference.peak_reserved_bytes
    return {
        "source": reference.source,
        "tokens_per_second_per_gpu": reference.tokens_per_second_per_gpu,
        "peak_reserved_gib": None if num_bytes is None else num_bytes / GIB,
    }


LADDER = [_case(rung) for rungs in ladder.LADDERS for rung in rungs]
