"""TrialCosts: what a trial of a configuration will take, by what those before it took."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

#: How much a trial compiles: nothing, but for Triton's kernels; layers or a model; or these, and each kernel's tilings
#: are measured.
PLAIN, COMPILED, AUTOTUNED = range(3)

# Before anything is known: what a trial takes outside of its steps, and how many times that of the one before; seconds.
_FIRST = 3.0
_MORE: Mapping[int, float] = {COMPILED: 5.0, AUTOTUNED: 8.0}


class TrialCosts:
    """Of one search."""

    def __init__(self, steps: int) -> None:
        """Each trial takes so many steps."""
        self._steps = steps
        self._outside: dict[int, list[float]] = {PLAIN: [], COMPILED: [], AUTOTUNED: []}

    def learn(self, *, compiles: int, outside_seconds: float) -> None:
        """What a trial took beside its steps."""
        self._outside[compiles].append(outside_seconds)

    def outside(self, *, compiles: int) -> float:
        """What a trial is expected to take beside its steps; seconds."""
        if self._outside[compiles]:
            return median(self._outside[compiles])
        return _FIRST if compiles == PLAIN else self.outside(compiles=compiles - 1) * _MORE[compiles]

    def of(self, *, compiles: int, step_seconds: float) -> float:
        """What a trial is expected to take; seconds."""
        return self.outside(compiles=compiles) + self._steps * step_seconds
