"""Optimizer: transformers makes it by its name; what it is, and how it keeps its states."""

from __future__ import annotations

from typing import Any

from pytest_llmperf.settings.optimizer import OptimizerEvidence
from pytest_llmperf.worker.settings import Training


def witness(training: Training) -> OptimizerEvidence:
    """Of the optimizer that accelerate wraps."""
    return seen_optimizer(training.optimizer)


def seen_optimizer(optimizer: Any) -> OptimizerEvidence:
    """What ``optimizer`` says of itself; bitsandbytes' tell of their states, of others the class says it."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return OptimizerEvidence(
        optimizer=type(optimizer).__name__,
        optimizer_fused=optimizer is not None and bool(optimizer.defaults.get("fused")),
        optimizer_bits="" if bits is None else f"{bits}bit",
        optimizer_paged=bool(getattr(optimizer, "is_paged", False)),
    )
