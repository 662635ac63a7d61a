"""Steady: which steps of a launch count, and how well their median is known. Pure; the worker stops by it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

# A median of fewer steps says nothing about them.
_LEAST = 5

# A step beyond this many robust standard deviations is a stall; it must not decide where the steady state begins.
_FAR = 5.0
_MAD_TO_SD = 1.4826

# The median of n values scatters about this much more than their mean does.
_MEDIAN_OVER_MEAN = 1.2533

# Autocorrelation below this is noise.
_CORRELATED = 0.05

# Truncations whose error is this near the least one are as good: the earliest of them keeps the most steps.
_AS_GOOD = 1.1

# Truncations tried: enough for any launch of ours, and a bound on the work for one of ten thousand steps.
_MOST_CUTS = 50

# Two speeds: this far apart in their own standard deviations (Ashman's D; a single bell cut in two has 2.7), each with
# this share of the steps, and this far apart in time.
_ASHMAN, _SMALLER_MODE, _APART = 4.0, 0.15, 0.01


@dataclass(frozen=True)
class Steady:
    """The steady part of a launch."""

    start: int
    """Index of the first step that counts."""
    error: float
    """Relative standard error of the median step time within this launch."""
    drift: float
    """Median of the last third of the steady steps over that of the first third, minus 1."""
    stalls: float
    """Share of the steady time that single slow steps lost; the median does not show it."""
    bimodal: bool
    """Whether the steps have two speeds."""


def find_steady(step_seconds: Sequence[float], warmup_steps: int) -> Steady:
    """Where the steady state of ``step_seconds`` begins, at ``warmup_steps`` or later, and what it is like.

    The cut is MSER's (White 1997): the one after which the mean's standard error is least, at most half of the steps
    gone. It looks at logarithms, with stalls clipped.

    Raises:
        ValueError: no step is left after ``warmup_steps``.
    """
    if not 0 <= warmup_steps < len(step_seconds):
        raise ValueError(f"{len(step_seconds)} steps, {warmup_steps} of them warm-up: none is left")
    if not all(0 < second < math.inf for second in step_seconds):  # validity names it; here it must only not raise
        return Steady(warmup_steps, math.inf, math.inf, 1.0, bimodal=False)
    measured = [math.log(second) for second in step_seconds]
    logs = _clipped(measured, warmup_steps)
    start = _truncation(logs, warmup_steps)
    steady, seconds = logs[start:], step_seconds[start:]
    third = max(1, len(steady) // 3)
    return Steady(
        start=start,
        error=_error_of_median(steady),
        drift=median(seconds[-third:]) / median(seconds[:third]) - 1,
        stalls=_stalled(seconds),
        bimodal=_is_bimodal(measured[start:]),
    )


def _clipped(logs: Sequence[float], warmup_steps: int) -> list[float]:
    # Scale and centre from the second half, which is steady if anything is.
    late = logs[min(max(warmup_steps, len(logs) // 2), len(logs) - 1) :]
    centre, spread = median(late), _robust_sd(late)
    # Steps on the way to the steady state are far off too, and are what the cut looks for: they keep their place
    # unless they stand alone.
    low, high = centre - _FAR * spread, centre + _FAR * spread
    clipped = []
    for index, value in enumerate(logs):
        neighbours = [*logs[max(0, index - 1) : index], *logs[index + 1 : index + 2]]
        alone = all(low <= neighbour <= high for neighbour in neighbours)
        clipped.append(min(max(value, low), high) if alone and spread > 0 else value)
    return clipped


def _truncation(logs: Sequence[float], warmup_steps: int) -> int:
    last = max(warmup_steps, min(len(logs) // 2, len(logs) - _LEAST))
    stride = 1 + (last - warmup_steps) // _MOST_CUTS
    errors = {start: _squared_error(logs[start:]) for start in range(warmup_steps, last + 1, stride)}
    good = _AS_GOOD * min(errors.values())
    return next(start for start, error in errors.items() if error <= good)


def _squared_error(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values) ** 2


def _error_of_median(logs: Sequence[float]) -> float:
    """Of autocorrelated steps about a straight line: what drifts is reported as drift, not as noise."""
    if len(logs) < _LEAST:
        return math.inf
    residuals = _about_a_line(logs)
    variance = math.fsum(value * value for value in residuals) / (len(residuals) - 2)
    return _MEDIAN_OVER_MEAN * math.sqrt(variance * _correlation_time(residuals) / len(residuals))


def _about_a_line(values: Sequence[float]) -> list[float]:
    middle, mean = (len(values) - 1) / 2, fmean(values)
    squares = math.fsum((index - middle) ** 2 for index in range(len(values)))
    slope = math.fsum((index - middle) * value for index, value in enumerate(values)) / squares
    return [value - mean - slope * (index - middle) for index, value in enumerate(values)]


def _correlation_time(residuals: Sequence[float]) -> float:
    """1 + 2·Σ autocorrelation, up to where it is lost in the noise: steps for one independent value."""
    power = math.fsum(value * value for value in residuals)
    total = 1.0
    for lag in range(1, len(residuals) // 4 + 1):
        product = math.fsum(a * b for a, b in zip(residuals, residuals[lag:], strict=False))
        if power <= 0 or product / power < _CORRELATED:
            break
        total += 2 * product / power
    return total


def _robust_sd(values: Sequence[float]) -> float:
    centre = median(values)
    return _MAD_TO_SD * median(abs(value - centre) for value in values)


def _stalled(seconds: Sequence[float]) -> float:
    centre = median(seconds)
    # A clock that never varies has no spread; a tenth of a step is a stall by any measure.
    far = centre + max(_FAR * _robust_sd(seconds), 0.1 * centre)
    return math.fsum(second - centre for second in seconds if second > far) / math.fsum(seconds)


def _is_bimodal(logs: Sequence[float]) -> bool:
    ordered = sorted(logs)
    least = max(2, math.ceil(_SMALLER_MODE * len(ordered)))
    gaps = [(ordered[cut] - ordered[cut - 1], cut) for cut in range(least, len(ordered) - least + 1)]
    if not gaps:
        return False
    _, cut = max(gaps)
    low, high = ordered[:cut], ordered[cut:]
    apart = fmean(high) - fmean(low)
    within = _squared_error(low) * len(low) + _squared_error(high) * len(high)
    return apart > _APART and apart * apart * 2 > _ASHMAN**2 * within
