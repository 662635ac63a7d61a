"""Whether a launch may count at all: its arithmetic adds up, what was asked for was active, nobody else was there.

A pure function of a spec and a record. What it finds makes a case ``invalid``, before any comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_llmperf.measurement import Launch
from pytest_llmperf.spec import TrainSpec

_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def troubles(spec: TrainSpec, launch: Launch, inactive: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """One line for each reason not to trust ``launch``; empty where there is none.

    ``inactive`` names settings that are declared to change nothing (Liger on a model without kernels): for them it is
    trouble if they *were* active.
    """
    found = [*_arithmetic(spec, launch), *_contradictions(spec, launch.evidence, inactive)]
    found += [f"another process on the hardware: {line}" for line in launch.health.foreign_processes]
    return tuple(found)


def _arithmetic(spec: TrainSpec, launch: Launch) -> Iterator[str]:
    expected = spec.sequences_per_step * spec.sequence_length
    if launch.tokens_per_step != expected:
        yield f"{launch.tokens_per_step} tokens a step were counted, the spec makes {expected}"
    if any(not 0 < second < math.inf for second in launch.step_seconds):  # also true of NaN
        yield "a step time is not a positive number"
    if not launch.losses:
        yield "no loss was recorded"
    elif any(not math.isfinite(loss) for loss in launch.losses):
        step = next(step for step, loss in enumerate(launch.losses, 1) if not math.isfinite(loss))
        yield f"the loss was {launch.losses[step - 1]} at step {step}"
    if launch.peak_reserved_bytes <= 0:
        yield "no memory use was recorded"


def _contradictions(spec: TrainSpec, evidence: Mapping[str, Any], inactive: frozenset[str]) -> Iterator[str]:
    for name, check in _CHECKS.items():
        try:
            line = check(spec, evidence)
        except KeyError as missing:
            line = f"no evidence of {missing.args[0]} was recorded"
        if name in inactive and line is None:
            yield f"{name} was declared to be inactive, and was active"
        elif name not in inactive and line is not None:
            yield line


def _liger(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    patched = evidence["liger_modules"]
    if spec.liger and not patched:
        note = evidence.get("liger_note")
        return "asked for liger, nothing was patched" + (f" ({note})" if note else "")
    if patched and not spec.liger:
        return f"liger was not asked for, and {patched} modules were patched"
    return None


def _attention(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _equal("attention", spec.attention, evidence["attention"])


def _weights(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _equal("weights of", [_DTYPES[spec.model_precision]], sorted(evidence["parameter_dtypes"]))


def _autocast(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    expected = None if spec.mixed_precision == "no" else _DTYPES[spec.mixed_precision]
    return _equal("autocast to", expected, evidence["autocast_dtype"])


def _tf32(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _equal("tf32", spec.tf32, evidence["tf32"])


def _world_size(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _equal("world size", spec.gpus, evidence["world_size"])


def _checkpointing(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _equal("gradient checkpointing", spec.gradient_checkpointing, evidence["gradient_checkpointing"])


def _compile(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _equal("torch_compile", spec.torch_compile, evidence["torch_compile"])


def _optimizer(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    if spec.optimizer in ("adamw_torch", "adamw_torch_fused"):
        asked = ("AdamW", spec.optimizer == "adamw_torch_fused")
        return _equal("optimizer (class, fused)", asked, (evidence["optimizer"], evidence["optimizer_fused"]))
    return None if evidence["optimizer"] else f"asked for optimizer {spec.optimizer}, none was seen"


def _equal(what: str, asked: object, seen: object) -> str | None:
    return None if asked == seen else f"asked for {what} {asked}, the run had {seen}"


_CHECKS: Mapping[str, Callable[[TrainSpec, Mapping[str, Any]], str | None]] = {
    "liger": _liger,
    "attention": _attention,
    "model_precision": _weights,
    "mixed_precision": _autocast,
    "tf32": _tf32,
    "gpus": _world_size,
    "gradient_checkpointing": _checkpointing,
    "torch_compile": _compile,
    "optimizer": _optimizer,
}
