"""On which terms one case is judged, beside what its spec and the run say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_llmperf.judge.gain import Terms
from pytest_llmperf.records.result import Reference


@dataclass(frozen=True, kw_only=True)
class CaseTerms:
    """What a test's markers say, or whoever else asks for a case."""

    rung: str = ""
    reference: Reference | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """By metric."""
    oom_below_gib: float | None = None
    inactive: frozenset[str] = frozenset()
    efficiency: Terms = field(default_factory=Terms)
    parity: bool = False
    """Whether what it trains is held beside its plain form first."""
    loss_curve: int = 0
    """Of how many seeds its loss curve is held against those before; 0: of none."""
