"""The twins of all settings, in the order of ``settings/registry.py``; a new one is listed here."""

from __future__ import annotations

from pytest_llmperf.worker.settings import (
    attention,
    batch,
    compilation,
    data,
    liger,
    optimizer,
    parallelism,
    precision,
    recomputation,
    weights,
)

TWINS = (
    precision.TWIN,
    attention.TWIN,
    liger.TWIN,
    compilation.TWIN,
    optimizer.TWIN,
    recomputation.TWIN,
    parallelism.TWIN,
    batch.TWIN,
    data.TWIN,
    weights.TWIN,
)
