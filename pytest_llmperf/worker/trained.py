"""Trained: what one rank saw of a finished run; the record is made of it, whatever has trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_llmperf.records.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank saw of a finished run."""

    step_seconds: tuple[float, ...]
    waiting_seconds: tuple[float, ...]
    losses: tuple[float, ...]
    tokens_per_step: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    train_seconds: float
    parameters: int
    canary: Mapping[str, float]
    evidence: Mapping[str, Any]
    trace: Trace
