"""Allocated growth: what a step leaves behind in memory, by a robust fit over the steps of a launch. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

#: Bytes a step that are no leak: what a trainer notes of a step takes a tenth (docs/explanation/noise.md).
MOST_GROWTH = 64 * 1024

# Standard deviations of the rank statistic: what only varies from step to step shows no growth.
_CERTAIN = 3.0

# Thirds of fewer steps are single values.
_LEAST = 9


def growth(held: Sequence[int]) -> float | None:
    """By how many bytes ``held``, as each step ended, grows a step at least; never below 0, ``None`` of too few steps.

    The slope is Theil and Sen's, at the lower end of its interval (Sen 1968): one jump, and what comes and goes, is no
    growth. Nor is what ends: each third has to be above the one before by as much.
    """
    number = len(held)
    if number < _LEAST:
        return None
    slopes = sorted((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(held), 2))
    spread = _CERTAIN * math.sqrt(number * (number - 1) * (2 * number + 5) / 18)
    lowest = slopes[max(0, int((len(slopes) - spread) / 2))]
    size = number // 3
    means = [sum(held[start : start + size]) / size for start in (0, (number - size) // 2, number - size)]
    late = (means[2] - means[1]) / (number - size - (number - size) // 2)
    return max(0.0, min(lowest, late))
