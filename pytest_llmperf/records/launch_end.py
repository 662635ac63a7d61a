"""Launch end: after which steps a launch may end, and what has to be known of it by then. Pure.

The judge says beforehand with which step times a launch passes (``judge/policy.py``); the worker goes by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import median

from pytest_llmperf.records.launch import Place, host_of, site_of
from pytest_llmperf.records.steady_state import Steady, find_steady

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
            len(step_seconds) >= self.steps
            and steady.error <= self.error  # also false of times that have no logarithm
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
    """Whether it is the turn of the case of ``digest``: once in so many nights, a share of all cases each night.

    The turn moves by a day from one such period to the next: a gate that runs weekly, or each second day, reaches all.
    """
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


def why_end(step_seconds: Sequence[float], warmup_steps: int, passing: PassingRange | None = None) -> str:
    """Why a launch of these steps may end; empty where more of them would say more."""
    if len(step_seconds) <= warmup_steps:
        return GOES_ON
    steady = find_steady(step_seconds, warmup_steps)
    if steady.error <= ENOUGH and abs(steady.drift) <= _STEADY_DRIFT:
        return KNOWN
    if passing and passing.holds(step_seconds, steady):
        return DECIDED
    return GOES_ON
