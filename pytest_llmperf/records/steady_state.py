"""Which steps of a launch count, how well their median is known, and what they leave behind in memory. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import fmean, median

from pytest_llmperf.records.calibration import Place, host_of, site_of

# A median of fewer steps says nothing about them.
_LEAST = 5
#: A nanosecond and thirty years: what is outside was not timed, and sums and ratios of what is inside stay finite.
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 1e9
# A step this many robust standard deviations off, and this far at least (a clock may never vary), is not steady.
_FAR, _NEAR = 5.0, 0.001
_MAD_TO_SD = 1.4826  # of a normal distribution
# That many such steps in a row, with steady ones before and after, are a stall and must not decide where the steady
# state begins; more of them, or a tenth of the steps where that is more, may be a chip that finds its power limit.
_STALL_STEPS, _STALL_SHARE, _STALL_MOST = 3, 0.1, 6
# A logarithm: a tenth of a step is a stall by any measure.
_STALLED = 0.1
# The median of n values scatters about this much more than their mean does.
_MEDIAN_OVER_MEAN = 1.2533
# Of so few steps a higher autocorrelation cannot be told from a drift.
_MOST_CORRELATED = 0.9
# Degrees of freedom for each step, at least: below it the variance itself is a guess.
_LEAST_FREEDOM = 0.3
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
    """Share of the time that slow steps lost and the median does not show: 1 - median / mean. Of the steady steps;
    before them a step counts only if it was far too slow after one that was not."""
    bimodal: bool


def find_steady(step_seconds: Sequence[float], warmup_steps: int, coming: int = 0) -> Steady:
    """Where the steady state of ``step_seconds`` begins, at ``warmup_steps`` or later, and what it is like. The cut is
    MSER's (White 1997): the one after which the mean's standard error is least, at most half of the steps gone. It
    looks at logarithms, and past stalls; the error and the drift have those clipped. So many are ``coming`` that are
    not timed yet: they count where steps have to be enough. ValueError: no step is left after ``warmup_steps``."""
    if not 0 <= warmup_steps < len(step_seconds):
        raise ValueError(f"{len(step_seconds)} steps, {warmup_steps} of them warm-up: none is left")
    if not all(SHORTEST_SECONDS <= second <= LONGEST_SECONDS for second in step_seconds):
        return Steady(warmup_steps, math.inf, math.inf, 1.0, bimodal=False)  # validity names it; here it only ends
    measured = [math.log(second) for second in step_seconds]
    # The steady level is the second half's, which is steady if anything is.
    late = measured[min(max(warmup_steps, len(measured) // 2), len(measured) - 1) :]
    level, far = median(late), max(_FAR * robust_sd(late), _NEAR)
    low, high = level - far, level + far
    logs = _clipped(measured, low, high)
    # Several stalled steps in a row would pull the cut past them even clipped; a chip at its power limit swings less.
    levelled = [
        level if clipped != before and abs(before - level) > _STALLED else clipped
        for clipped, before in zip(logs, measured, strict=True)
    ]
    last = max(warmup_steps, min(len(levelled) // 2, len(levelled) - _LEAST))
    stride = 1 + (last - warmup_steps) // _MOST_CUTS
    errors = {start: _squared_error(levelled[start:]) for start in range(warmup_steps, last + 1, stride)}
    good = _AS_GOOD * min(errors.values())
    start = next(start for start, error in errors.items() if error <= good)
    steady = logs[start:]
    third = max(1, len(steady) // 3)
    settled = next((index for index, value in enumerate(measured) if value <= high), start)
    counted, usual = step_seconds[min(start, max(warmup_steps, settled)) :], median(step_seconds[start:])
    early, far_off = counted[: len(counted) - len(steady)], math.exp(high)
    # With their sign: what noise adds on one side it takes on the other.
    stalled = (*step_seconds[start:], *(second for second in early if second > far_off))
    return Steady(
        start=start,
        error=_error_of_median(steady) if len(steady) + coming >= _LEAST else math.inf,
        drift=math.expm1(median(steady[-third:]) - median(steady[:third])),
        stalls=max(0.0, math.fsum(second - usual for second in stalled)) / math.fsum(counted),
        bimodal=_is_bimodal(measured[start:]),
    )


def _clipped(logs: Sequence[float], low: float, high: float) -> list[float]:
    longest = min(_STALL_MOST, max(_STALL_STEPS, int(_STALL_SHARE * len(logs))))
    clipped = list(logs)
    groups = itertools.groupby(range(len(logs)), key=lambda index: low <= logs[index] <= high)
    for run in (list(members) for inside, members in groups if not inside):
        # Steps on the way to the steady state are far off too, and are what the cut looks for: no steady step comes
        # before them. Of several at the end nobody knows yet whether they pass.
        passed = run[0] > 0 and (run[-1] + 1 < len(logs) or len(run) == 1)
        if passed and len(run) <= longest:
            clipped[run[0] : run[-1] + 1] = [min(max(logs[index], low), high) for index in run]
    return clipped


def _squared_error(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values) ** 2


def _error_of_median(logs: Sequence[float]) -> float:
    """Take steps as autocorrelated about a straight line: what drifts is reported as drift, not as noise."""
    number, mean = len(logs), fmean(logs)
    places = [index - (number - 1) / 2 for index in range(number)]
    products = (place * value for place, value in zip(places, logs, strict=True))
    slope = math.fsum(products) / math.fsum(place**2 for place in places)
    residuals = [value - mean - slope * place for place, value in zip(places, logs, strict=True)]
    # Steps for one independent value, if each one follows the last (AR(1)); never fewer than one. About a line fitted
    # to few values, autocorrelation comes out lower than it is (Kendall 1954, for a mean).
    power, correlation = math.fsum(value * value for value in residuals), 1.0
    lagged = math.fsum(a * b for a, b in itertools.pairwise(residuals)) / power if power > 0 else -1.0
    rho = min(lagged + (2 + 4 * lagged) / number, _MOST_CORRELATED)
    if rho > 0:
        correlation = (1 + rho) / (1 - rho) - 2 * rho * (1 - rho**number) / (number * (1 - rho) ** 2)
    # The line took two of the independent values, of which there are fewer than steps.
    freedom = max(number - 2 * correlation, _LEAST_FREEDOM * number)
    variance = power / freedom
    return _MEDIAN_OVER_MEAN * math.sqrt(variance * correlation / number)


def robust_sd(values: Sequence[float], centre: float | None = None) -> float:
    """From the median distance to ``centre`` (their median, if left out): up to half of ``values`` may be far off."""
    centre = median(values) if centre is None else centre
    return _MAD_TO_SD * median(abs(value - centre) for value in values)


def _is_bimodal(logs: Sequence[float]) -> bool:
    ordered = sorted(logs)
    least = max(2, math.ceil(_SMALLER_MODE * len(ordered)))
    if not (gaps := [(ordered[cut] - ordered[cut - 1], cut) for cut in range(least, len(ordered) - least + 1)]):
        return False
    _, cut = max(gaps)
    low, high = ordered[:cut], ordered[cut:]
    apart = fmean(high) - fmean(low)
    within = _squared_error(low) * len(low) + _squared_error(high) * len(high)
    return apart > _APART and apart * apart * 2 > _ASHMAN**2 * within


#: Bytes a step that are no leak: what a trainer notes of a step takes a tenth (docs/explanation/noise.md).
MOST_GROWTH = 64 * 1024
# Standard deviations of the rank statistic: what only varies from step to step shows no growth.
_CERTAIN = 3.0
# Thirds of fewer steps are single values.
_LEAST_GROWN = 9


def growth(held: Sequence[int]) -> float | None:
    """By how many bytes ``held``, as each step ended, grows a step at least; never below 0, ``None`` of too few steps.
    The slope is Theil and Sen's, at the lower end of its interval (Sen 1968): one jump, and what comes and goes, is no
    growth. Nor is what ends: each third has to be above the one before by as much."""
    number = len(held)
    if number < _LEAST_GROWN:
        return None
    slopes = sorted((b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(held), 2))
    spread = _CERTAIN * math.sqrt(number * (number - 1) * (2 * number + 5) / 18)
    lowest = slopes[max(0, int((len(slopes) - spread) / 2))]
    size = number // 3
    means = [sum(held[start : start + size]) / size for start in (0, (number - size) // 2, number - size)]
    late = (means[2] - means[1]) / (number - size - (number - size) // 2)
    return max(0.0, min(lowest, late))


# Launch end: after which steps a launch may end, and what has to be known of it by then. Pure.

#: Launches of one spec scatter by 0.3 % and more (docs/explanation/noise.md): a median known to this adds little.
ENOUGH = 0.002
# A launch that still drifts by more is not yet at its steady state.
_STEADY_DRIFT = 0.01
# How far more steps may still move a median, in its standard errors: these are of few steps, and errors themselves.
_MOVES = 4.0
# The first looks are this many steps apart, later ones an eighth of what has run.
_STRIDE, _SHARE = 4, 8
#: Why a launch ended before its last step: its median was known, or what its case is was decided; else it did not.
KNOWN, DECIDED, GOES_ON = "known", "decided", ""


@dataclass(frozen=True)
class PassingRange:
    """The step times with which a launch, by itself, passes its case, and how well they have to be known for that."""

    low: float
    """Of the logarithm of its median step time in seconds."""
    high: float
    error: float
    """The standard error of the median, at most: more of it would blur what the case is held against."""
    drift: float
    """Of its steady steps, at most."""
    stalls: float = 1.0
    """The share of the time that they lose, at most."""
    steps: int = 0
    """At least, of which most are steady."""

    def holds(self, step_seconds: Sequence[float], steady: Steady) -> bool:
        """Whether more steps would leave the median of these in the range."""
        # What has drifted may drift on by as much.
        reach = _MOVES * steady.error + abs(steady.drift)
        return (
            steady.error <= self.error  # also false of times that have no logarithm
            and abs(steady.drift) <= self.drift
            and steady.stalls <= self.stalls
            and self.low + reach < math.log(median(step_seconds[steady.start :])) < self.high - reach
        )


@dataclass(frozen=True)
class PassingRanges:
    """The same wherever a launch may run: a baseline expects another step time of each site."""

    at_sites: Mapping[str, PassingRange]
    """By ``Launch.site``, of those that the baseline knows."""
    on_hosts: Mapping[str, PassingRange]
    """By ``Launch.host``, on GPUs that it does not know."""
    elsewhere: PassingRange

    def at(self, places: Sequence[Place]) -> PassingRange:
        """Where ranks are in ``places``."""
        return self.at_sites.get(site_of(places)) or self.on_hosts.get(host_of(places)) or self.elsewhere


def takes_all_steps(digest: str, day: date, nights: int) -> bool:
    """Whether it is the turn of the case of ``digest``: once in so many nights, a share of all cases each night. The
    turn moves by a day from one such period to the next: a gate that runs weekly, or each second day, reaches all."""
    ordinal = day.toordinal()
    return nights > 0 and (int(digest[:8], 16) + ordinal + ordinal // nights) % nights == 0


def looks(least: int, most: int) -> list[int]:
    """The steps after which a launch may end, growing further apart."""
    found = []
    step = least
    while step < most:
        found.append(step)
        step += max(_STRIDE, step // _SHARE)
    return found


def why_end(
    step_seconds: Sequence[float], warmup_steps: int, passing: PassingRange | None = None, coming: int = 0
) -> str:
    """Why a launch of these steps, with so many ``coming`` that are issued, may end; empty: more would say more."""
    if len(step_seconds) <= warmup_steps:
        return GOES_ON
    steady = find_steady(step_seconds, warmup_steps, coming)
    if steady.error <= ENOUGH and abs(steady.drift) <= _STEADY_DRIFT:
        return KNOWN
    if passing and len(step_seconds) + coming >= passing.steps and passing.holds(step_seconds, steady):
        return DECIDED
    return GOES_ON
