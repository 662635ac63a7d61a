"""Batch: how many sequences of how many tokens a step has, and in how many passes each rank computes its share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_llmperf.settings.parallelism import few_ranks
from pytest_llmperf.settings.precision import FP8_MULTIPLE
from pytest_llmperf.settings.setting import Axis, Choice, Search, Setting, SpecError, TrainSpec

#: The field that a search changes last, and the name of its axis.
SIZE, AXIS = "micro_batch_size", "micro-batch"

#: Sequences of a small step, whoever shares them; and its passes at most.
SEQUENCES, PASSES = 8, 2

# Tokens of a small sequence at most: more than a block of 128, and no whole number of these.
_LONGEST = 192

# Powers of two, and what lies in the middle of two of them.
_SIZES = tuple(sorted({1, *(2**power for power in range(1, 10)), *(3 * 2**power for power in range(8))}))


def _clash(spec: TrainSpec) -> str | None:
    length, positions = spec.sequence_length, spec.architecture.max_sequence_length
    if length < 2:  # noqa: PLR2004 - a causal model predicts the next token: one token has none
        return "sequence_length=1 leaves no next token to predict; use at least 2"
    if positions is not None and length > positions:
        return f"sequence_length={length} exceeds the model's {positions} positions"
    return None


def _small(spec: TrainSpec) -> Mapping[str, Any]:
    passes = min(spec.gradient_accumulation_steps, PASSES)
    length = min(spec.sequence_length, _LONGEST)
    return {
        "gradient_accumulation_steps": passes,
        "micro_batch_size": SEQUENCES // (few_ranks(spec) * passes),
        "sequence_length": length if spec.fp8 == "no" else max(FP8_MULTIPLE, length // FP8_MULTIPLE * FP8_MULTIPLE),
    }


def _axis(base: TrainSpec, search: Search) -> Axis:
    """Micro-batches, with the accumulation that a fixed global batch asks for."""
    if search.global_batch is None:
        sizes = sorted({*_SIZES, base.micro_batch_size})
        return Axis(AXIS, tuple(Choice.of(str(size), micro_batch_size=size) for size in sizes))
    each, rest = divmod(search.global_batch, base.gpus)
    if rest or not each:
        raise SpecError(f"a global batch of {search.global_batch} sequences cannot be shared by {base.gpus} GPUs alike")
    wanted = [base.micro_batch_size] if SIZE in search.fixed else range(1, each + 1)
    choices = [
        Choice.of(str(size), micro_batch_size=size, gradient_accumulation_steps=each // size)
        for size in wanted
        if each % size == 0
    ]
    if not choices:
        raise SpecError(
            f"a global batch of {search.global_batch} sequences on {base.gpus} GPU(s) is no multiple of the "
            f"micro-batch {base.micro_batch_size}"
        )
    return Axis(AXIS, tuple(choices))


SETTING = Setting(
    name="batch",
    fields=("micro_batch_size", "sequence_length", "gradient_accumulation_steps"),
    in_id={
        "sequence_length": "seq{}",
        "micro_batch_size": lambda spec: f"mbs{spec.micro_batch_size}",
        "gradient_accumulation_steps": "accum{}",
    },
    least={"micro_batch_size": 1, "sequence_length": 1, "gradient_accumulation_steps": 1},
    clash=_clash,
    small=_small,
    plain=lambda _: {"gradient_accumulation_steps": 1, "micro_batch_size": SEQUENCES},
    axis=_axis,
)
