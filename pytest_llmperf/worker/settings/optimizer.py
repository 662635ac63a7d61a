"""Optimizer: transformers makes it by its name; what it is, and how it keeps its states."""

from __future__ import annotations

from typing import Any

from pytest_llmperf.settings.optimizer import OptimizerEvidence
from pytest_llmperf.worker.settings.twin import Twin, seen


def seen_optimizer(optimizer: Any) -> OptimizerEvidence:
    """What ``optimizer`` says of itself; bitsandbytes' tell of their states, of others the class says it."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return OptimizerEvidence(
        optimizer=type(optimizer).__name__,
        optimizer_fused=optimizer is not None and bool(optimizer.defaults.get("fused")),
        optimizer_bits="" if bits is None else f"{bits}bit",
        optimizer_paged=bool(getattr(optimizer, "is_paged", False)),
    )


TWIN = Twin(
    name="optimizer",
    # Constant: a schedule over the number of steps would make what is learnt depend on how long one measures.
    arguments=lambda spec, _: {"optim": spec.optimizer, "lr_scheduler_type": "constant"},
    watch=seen(lambda training: seen_optimizer(training.optimizer)),
)
