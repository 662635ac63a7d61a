"""What value each field of a TrainSpec may have by itself; ``combination_checks.py`` knows what goes together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmperf.spec.choices import (
    ATTENTIONS,
    CHECKPOINTING_POLICIES,
    COMPILE_MODES,
    COMPILE_SCOPES,
    DATA,
    FP8_RECIPES,
    MIXED_PRECISIONS,
    MODEL_PRECISIONS,
    OF_A_TEXT,
    PARALLELISMS,
    ROWS,
    RUNNABLE_OPTIMIZERS,
    SDPA_BACKENDS,
    TOKENISING,
    UNSUPPORTED_OPTIMIZERS,
)
from pytest_llmperf.support.quantities import A_TOLERANCE, is_tolerance
from pytest_llmperf.support.suggestions import hint

if TYPE_CHECKING:
    from pytest_llmperf.spec.train_spec import TrainSpec

_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, type(None)),
    "float | None": (float, int, type(None)),
}

_NAMES: Mapping[str, tuple[str, ...]] = {
    "model_precision": MODEL_PRECISIONS,
    "mixed_precision": MIXED_PRECISIONS,
    "attention": ATTENTIONS,
    "sdpa_backend": SDPA_BACKENDS,
    "torch_compile_mode": COMPILE_MODES,
    "torch_compile_scope": COMPILE_SCOPES,
    "fp8": FP8_RECIPES,
    "optimizer": RUNNABLE_OPTIMIZERS,
    "checkpointing_policy": CHECKPOINTING_POLICIES,
    "parallelism": PARALLELISMS,
    "data": DATA,
    "rows": ROWS,
    "tokenise": TOKENISING,
}

_COUNTS = ("gpus", "micro_batch_size", "sequence_length", "gradient_accumulation_steps", "steps", "min_steps")

# numpy, which the Trainer seeds too, takes no larger one.
_SEEDS = 2**32


def problems(spec: TrainSpec) -> Iterator[str]:
    """Why a value cannot be, a line each; a later one may only be asked for where no earlier one was found.

    Raises:
        SpecError: there is no such model, text or tokenizer.
    """
    yield from _types(spec)
    yield from _names(spec)
    yield from _texts(spec)
    yield from _numbers(spec)
    yield from _steps(spec)


def _types(spec: TrainSpec) -> Iterator[str]:
    for f in fields(spec):
        value, expected = getattr(spec, f.name), str(f.type)
        # bool is an int to Python, and never one to a user.
        if not isinstance(value, _TYPES[expected]) or (expected != "bool" and isinstance(value, bool)):
            yield f"TrainSpec: {f.name}={value!r} must be {expected}, not {type(value).__name__}"


def _names(spec: TrainSpec) -> Iterator[str]:
    if spec.optimizer in UNSUPPORTED_OPTIMIZERS:
        yield f"TrainSpec: optimizer={spec.optimizer!r}: {UNSUPPORTED_OPTIMIZERS[spec.optimizer]}"
    for name, known in _NAMES.items():
        value = getattr(spec, name)
        if value not in known:
            yield f"TrainSpec: unknown {name} {value!r}{hint(value, known)}; known: {_some(known)}"
    if spec.weights is not None and not _is_folder(spec.weights):
        yield f"TrainSpec: weights={spec.weights!r} names no folder, expected one as save_pretrained writes it"


def _texts(spec: TrainSpec) -> Iterator[str]:
    """Where no text is asked for, what says which one changes nothing, and would look as if it did."""
    if spec.data == "text":
        try:
            _ = spec.text_files.fingerprint, spec.tokenizer_files.fingerprint
        except OSError as error:
            yield f"TrainSpec: {error.filename}: cannot be read ({error.strerror})"
        return
    for f in fields(spec):
        value = getattr(spec, f.name)
        if f.name in (*OF_A_TEXT, "tokenise") and value != f.default:
            yield f"TrainSpec: {f.name}={value!r} without data='text' changes nothing"


def _numbers(spec: TrainSpec) -> Iterator[str]:
    positions = spec.architecture.max_sequence_length
    for name in _COUNTS:
        if getattr(spec, name) < 1:
            yield f"TrainSpec: {name}={getattr(spec, name)} must be at least 1"
    if spec.data_workers < 0:
        yield f"TrainSpec: data_workers={spec.data_workers} must be at least 0"
    if spec.data_prefetch is not None and spec.data_prefetch < 1:
        yield f"TrainSpec: data_prefetch={spec.data_prefetch} must be at least 1, or left out"
    length = spec.sequence_length
    if length < 2:  # noqa: PLR2004 - a causal model predicts the next token: one token has none
        yield f"{spec.id}: sequence_length=1 leaves no next token to predict; use at least 2"
    if positions is not None and length > positions:
        yield f"{spec.id}: sequence_length={length} exceeds the model's {positions} positions"
    for name in ("throughput_tolerance", "memory_tolerance"):
        value = getattr(spec, name)
        if value is not None and not is_tolerance(value):
            yield f"{spec.id}: {name}={value} must be {A_TOLERANCE}"
    if not 0 <= spec.seed < _SEEDS:
        yield f"{spec.id}: seed={spec.seed} must be at least 0 and below 2**32"


def _steps(spec: TrainSpec) -> Iterator[str]:
    warmup, steps, least = spec.warmup_steps, spec.steps, spec.min_steps
    if warmup < 1:
        yield f"{spec.id}: warmup_steps={warmup} must be at least 1: the first step is never steady"
    if warmup >= steps:
        yield f"{spec.id}: warmup_steps={warmup} leaves no step to measure of steps={steps}; lower it, or raise steps"
    default = next(f.default for f in fields(spec) if f.name == "min_steps")
    if least > steps and least != default:  # the default is nobody's word: steps bounds it
        yield f"{spec.id}: min_steps={least} is more than steps={steps}; lower it too, or raise steps"


def _is_folder(name: str) -> bool:
    try:
        return bool(name) and Path(name).is_dir()
    except OSError:  # too long a name, or a parent that may not be read
        return False


def _some(known: tuple[str, ...]) -> str:
    return ", ".join(known[:8]) + (f", … ({len(known)} in all)" if len(known) > 8 else "")  # noqa: PLR2004
