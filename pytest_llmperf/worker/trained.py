"""Trained: what one rank saw of a finished run; the record is made of it, whatever has trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.learning.learning import UNWANTED as UNINSPECTED
from pytest_llmperf.records.learning.learning import RankLearning, uninspected
from pytest_llmperf.records.trace import UNWANTED, Trace


@dataclass(frozen=True)
class Later:
    """What one rank sees after all that is timed."""

    attention_kernel: str = "unknown"
    """The operators that attention calls."""
    trace: Trace = field(default_factory=lambda: Trace(none=UNWANTED))
    learning: RankLearning = field(default_factory=lambda: uninspected(UNINSPECTED))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank saw of a finished run."""

    step_seconds: tuple[float, ...]
    waiting_seconds: tuple[float, ...]
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...] = ()
    """Of the first steps, before clipping."""
    tokens_per_step: int
    allocated_bytes: tuple[int, ...] = ()
    """As each step ended."""
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    train_seconds: float
    parameters: int
    canary: Mapping[str, float]
    calibration: Calibration | None = None
    real_tokens: tuple[int, ...] = ()
    """Of every step, those that were no padding; empty where there is none."""
    evidence: Mapping[str, Any]
    """But for what is seen ``later``."""
    later: Later = field(default_factory=Later)
