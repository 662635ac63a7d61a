"""Bisection: what one search was asked for, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_llmperf.judge.yardstick import By, Side, Yardstick
from pytest_llmperf.records.candidate import Candidate
from pytest_llmperf.support import codec


@dataclass(frozen=True, kw_only=True)
class BisectionOrder:
    """What was asked for."""

    good: str
    bad: str
    by: By | None = None
    """``None``: by the first in which the ends differ."""
    seconds: float = 3600.0
    """For all of it."""
    max_pairs: int = 8
    """Of one comparison at most; the run's settings allow as many launches of a side."""


@dataclass(frozen=True)
class Change:
    """Of a ratio of step times, as a logarithm: between ``low`` and ``high`` with 95 %."""

    log: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """One candidate, beside the good end."""

    candidate: Candidate
    side: Side | None
    """``None``: its comparison was broken off."""
    pairs: int = 0
    change: Change | None = None
    exact: tuple[str, ...] = ()
    """What is counted, or else exact, and is not as at the good end."""
    reason: str = ""
    """Why it was skipped."""
    was_kept: bool = False
    """Whether no launch was needed for it, since an earlier run had made them."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "candidate": codec.plain(self.candidate),
            "side": self.side,
            "pairs": self.pairs,
            "change": vars(self.change) if self.change else None,
            "exact": list(self.exact),
            "reason": self.reason,
            "kept": self.was_kept,
        }


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """What was found."""

    good: Candidate
    bad: Candidate
    num_candidates: int
    """After the good end, the bad one included."""
    yardstick: Yardstick | None = None
    """``None``: the ends do not differ, or it is not known."""
    steps: tuple[Step, ...] = ()
    """The bad end's first."""
    suspects: tuple[Candidate, ...] = ()
    """Those that may be the first bad one; one, if it was found."""
    last_good: Candidate | None = None
    change: Change | None = None
    """Of the step times of the first bad one over those of the last good one."""
    exact: tuple[str, ...] = ()
    """What else is exact and changed between the two."""
    diagnosis: str = ""
    confidence: float = 0.0
    """At least, that the first bad one is among the suspects."""
    ended: str = ""
    """What ended it before its end: ``time`` or ``interrupted``."""
    notes: tuple[str, ...] = ()

    @property
    def first_bad(self) -> Candidate | None:
        """The one that was found; ``None``: none, or several may be it."""
        return self.suspects[0] if len(self.suspects) == 1 and self.yardstick else None
