"""TuningOrder: what a search is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_llmperf.judge.tuning.objective import Objective
from pytest_llmperf.spec.space.space import Space


@dataclass(frozen=True, kw_only=True)
class TuningOrder:
    """One search."""

    space: Space
    objective: Objective
    seconds: float
    """For all of it, from its first candidate to its last word."""
    proves: bool = True
    """Whether its winner has to train as its plain form does, and is launched as a case."""
