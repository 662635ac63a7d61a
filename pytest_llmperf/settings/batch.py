"""Batch: how many sequences a step has and in how many passes; duration: how many steps, and what is held of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_llmperf.settings.parallelism import data_ranks, few_ranks, is_context
from pytest_llmperf.settings.precision import FP8_MULTIPLE
from pytest_llmperf.settings.setting import Axis, Search, Setting, SpecError, TrainSpec
from pytest_llmperf.support.user_input import A_TOLERANCE, is_tolerance

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
        "micro_batch_size": SEQUENCES // (min(few_ranks(spec), data_ranks(spec)) * passes),
        "sequence_length": length if spec.fp8 == "no" else max(FP8_MULTIPLE, length // FP8_MULTIPLE * FP8_MULTIPLE),
    }


def _axis(base: TrainSpec, search: Search) -> Axis:
    """Micro-batches, with the accumulation that a fixed global batch asks for."""
    if search.global_batch is None:
        return Axis.of(AXIS, {str(size): {SIZE: size} for size in sorted({*_SIZES, base.micro_batch_size})})
    each, rest = divmod(search.global_batch, data_ranks(base))
    if rest or not each:
        raise SpecError(f"a global batch of {search.global_batch} sequences cannot be shared by {base.gpus} GPUs alike")
    wanted = [base.micro_batch_size] if SIZE in search.fixed else range(1, each + 1)
    fitting = [size for size in wanted if each % size == 0]
    if not (choices := {str(size): {SIZE: size, "gradient_accumulation_steps": each // size} for size in fitting}):
        raise SpecError(
            f"a global batch of {search.global_batch} sequences on {base.gpus} GPU(s) is no multiple of the "
            f"micro-batch {base.micro_batch_size}"
        )
    return Axis.of(AXIS, choices)


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
    # Ranks that share no sequence there have batches of their own.
    in_fp32=lambda spec: {"micro_batch_size": max(1, spec.micro_batch_size // (spec.gpus if is_context(spec) else 1))},
    axis=_axis,
)


# Duration: how long a training is measured and by what it is judged, which is no part of its work.
_TOLERANCES = ("throughput_tolerance", "memory_tolerance")


def _duration_clash(spec: TrainSpec) -> str | None:
    warmup, steps, least = spec.warmup_steps, spec.steps, spec.min_steps
    for name in _TOLERANCES:
        value = getattr(spec, name)
        if value is not None and not is_tolerance(value):
            return f"{name}={value} must be {A_TOLERANCE}"
    if warmup < 1:
        return f"warmup_steps={warmup} must be at least 1: the first step is never steady"
    if warmup >= steps:
        return f"warmup_steps={warmup} leaves no step to measure of steps={steps}; lower it, or raise steps"
    if least > steps and least != type(spec).min_steps:  # the default is nobody's word: steps bounds it
        return f"min_steps={least} is more than steps={steps}; lower it too, or raise steps"
    return None


DURATION = Setting(
    name="duration",
    fields=("steps", "min_steps", "warmup_steps", *_TOLERANCES),
    least={"steps": 1, "min_steps": 1},
    clash=_duration_clash,
    small=lambda _: {"steps": 2, "min_steps": 2, "warmup_steps": 1, **dict.fromkeys(_TOLERANCES)},
)
