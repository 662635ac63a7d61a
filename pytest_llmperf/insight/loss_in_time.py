"""What a training had learnt by when, from the losses and seconds of its steps. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, isfinite, log10
from statistics import fmean

#: Losses of single steps jump with what is in their batch: a loss is the mean of so many.
STEPS = 8


@dataclass(frozen=True)
class LossInTime:
    """Of one training."""

    losses: Sequence[float]
    """In nats, of each step."""
    ends: Sequence[float]
    """Seconds from the first step's begin to the end of each."""

    @classmethod
    def of(cls, losses: Sequence[float], step_seconds: Sequence[float]) -> LossInTime:
        """From what a launch's record has, as far as both go."""
        num = min(len(losses), len(step_seconds))
        return cls(losses[:num], list(accumulate(step_seconds[:num])))

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return self.ends[-1] if self.ends else 0.0

    @property
    def last(self) -> float | None:
        """Of the last steps; ``None`` where one of them is no number, or there is none."""
        return _mean(self.losses[-STEPS:])

    def after(self, seconds: float) -> float | None:
        """Of the last steps that had ended by then; ``None``: none had, or the training was over before."""
        done = bisect_right(self.ends, seconds)
        return _mean(self.losses[max(0, done - STEPS) : done]) if done and seconds <= self.seconds else None


def common_times(trainings: Sequence[LossInTime]) -> list[float]:
    """A quarter, half and all of the shortest one's seconds, rounded down to two digits."""
    shortest = min((one.seconds for one in trainings if one.seconds > 0), default=0.0)
    return sorted({_rounded(shortest * share) for share in (0.25, 0.5, 1.0)} - {0.0})


def _mean(losses: Sequence[float]) -> float | None:
    return fmean(losses) if losses and all(map(isfinite, losses)) else None


def _rounded(value: float) -> float:
    if value <= 0:
        return 0.0
    unit = 10.0 ** (floor(log10(value)) - 1)
    # A hair more, so that what is a whole number of units stays one.
    return round(floor(value / unit * (1 + 1e-12)) * unit, 12)
