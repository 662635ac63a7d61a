"""JudgedCurve: what was found of a training's losses beside those of the same seeds before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

CurveWord = Literal["worse", "faster", "undecided", "same", "recorded"]

#: All of them.
CURVE_WORDS: tuple[CurveWord, ...] = get_args(CurveWord)

#: Those of a training that does not learn what it did: to lose less than one may is as wrong as to lose more.
OTHER_LEARNING: frozenset[str] = frozenset[CurveWord]({"worse", "faster"})


@dataclass(frozen=True, kw_only=True)
class JudgedPart:
    """The mean loss of some steps, over the seeds that were trained."""

    first: int
    """Its first step, counted from 1."""
    last: int
    loss: float
    """Nats a token, as printed."""
    stored: float
    """The same of the stored trainings that it was held against."""
    nothing: float
    """Up to here a difference is none, in nats."""
    seen: float | None = None
    """The least difference that these trainings could have told from nothing; of one alone nobody knows."""

    @property
    def difference(self) -> float:
        """In nats; below 0 it learns faster."""
        return self.loss - self.stored


@dataclass(frozen=True, kw_only=True)
class JudgedCurve:
    """The verdict and its figures."""

    verdict: CurveWord
    reason: str
    """One line."""
    seeds: tuple[int, ...]
    """That were trained."""
    stored_seeds: int
    parts: tuple[JudgedPart, ...] = ()
