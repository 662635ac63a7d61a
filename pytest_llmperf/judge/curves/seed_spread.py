"""Spread: how far apart trainings of other seeds are in each part, and what difference beside that is none. Pure.

A seed draws the order of the rows and the initial weights. Nobody calls it wrong to draw others, so a small share of
what that does is nothing; nor is what rounding does, which moved single losses by up to 0.04 % (0.0051 nats of 12, in
fp8 on H200: docs/explanation/verdicts/exact.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from pytest_llmperf.judge.curves.loss_parts import parts_of

# Of a standard deviation between seeds: the mean of sixteen trainings is not known better than that.
_SHARE = 0.25
# Of the loss: about twice what rounding was seen to do to one, and a part is a mean of many.
_ROUNDING = 0.001


@dataclass(frozen=True)
class SeedSpread:
    """Of one part."""

    mean: float
    """Nats a token."""
    sd: float

    @property
    def nothing(self) -> float:
        """Up to here a difference in the mean loss is none, in nats."""
        return max(_SHARE * self.sd, _ROUNDING * self.mean)


def spreads(curves: Sequence[Sequence[float]]) -> tuple[SeedSpread, ...]:
    """Of each part, over the losses of two seeds or more."""
    by_part = zip(*map(parts_of, curves), strict=True)
    return tuple(SeedSpread(fmean(part), stdev(part)) for part in by_part)
