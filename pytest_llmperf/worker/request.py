"""Request: what a launch's ranks are asked for, as the launcher left it in ``request.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_llmperf.records.batch_size_search import Search
from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.launch_end import PassingRanges
from pytest_llmperf.records.learning import UNWANTED as UNINSPECTED
from pytest_llmperf.records.learning import RankLearning, uninspected
from pytest_llmperf.records.parity import ParityOrder
from pytest_llmperf.records.trace import UNWANTED, Trace
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec


@dataclass(frozen=True, kw_only=True)
class Request:
    """Beside what torchrun says in the environment."""

    spec: TrainSpec
    folder: Path
    model_config: Mapping[str, Any]
    memory_limit_bytes: int = 0
    search: Search | None = None
    passing: PassingRanges | None = None
    """With which step times the launch passes; ``None``: its median has to be known."""
    trace: bool = True
    """Whether steps are traced after those that are timed."""
    inspect: bool = True
    """Whether one step more is looked at in full."""
    all_steps: bool = False
    """Whether it takes all its steps, whatever is known before."""
    calibrations: str = ""
    """The folder of the GPUs' calibrations; empty: none is asked for."""
    parity: ParityOrder | None = None
    """Small trainings in the place of the one that is measured."""

    @classmethod
    def read(cls, folder: Path) -> Request:
        """What ``folder`` holds."""
        values = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        search, passing = values.get("search"), values.get("passing")
        return cls(
            spec=TrainSpec.from_dict(values["spec"]),
            folder=folder,
            model_config=values["model_config"],
            memory_limit_bytes=values.get("memory_limit_bytes") or 0,
            search=Search(**search) if search else None,
            passing=codec.read(PassingRanges, passing) if passing else None,
            trace=values.get("trace", True) and not search,
            inspect=values.get("inspect", True) and not search,
            all_steps=values.get("all_steps", False),
            calibrations=values.get("calibrations", ""),
            parity=codec.read(ParityOrder, values["parity"]) if values.get("parity") else None,
        )


# Trained: what one rank saw of a finished run; the record is made of it, whatever has trained.


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
