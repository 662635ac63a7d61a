"""Early stop: before a launch, with which step times it will pass its case by itself. Pure.

More steps of such a launch would decide nothing, so it may end (``records/launch_end.py``). One that is near a limit,
or beyond it, goes on until its median is known; so does every later launch of a case that one did not decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low
from typing import Any

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.gpu_panel import Unit
from pytest_llmperf.judge.noise import log_of
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.stats import Difference, passes_below
from pytest_llmperf.judge.verdict import highest
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.launch_end import ENOUGH, PassingRange, PassingRanges
from pytest_llmperf.records.metrics import METRICS

# Of the error of the difference that decides: a median known to half of it adds an eighth.
_WEIGHT = 0.5

# Of the tolerance: a launch that drifts by half of it has no one speed (``validity.py``), so this one is not near that.
_DRIFT = 0.2

# Of what passes: in fewer steps one that stalls weighs more, and what the slowest rank lost is not seen by another.
_STALLS = 0.5

# Steps, of those that most launches of the case took until they were steady: a chip that has not yet found its power
# limit shows no drift.
_SETTLED = 1.5

# Enough for a median, and to be its own steady state.
_STEPS = 8

# No host and no device has this name: they have letters.
_UNSEEN = "?"


def passing_ranges(baseline: Baseline, policy: Policy, day: str, *, is_shared: bool = False) -> PassingRanges | None:
    """With which step times one launch on ``day`` (UTC, ISO 8601) passes, on each site of ``baseline`` and elsewhere.

    ``is_shared``: other cases compute with the launch too, and it has to tell them no less than a longer one.
    ``None``: nothing is held that fewer steps leave as it is.
    """
    gating = [row for name, row in METRICS.items() if name in policy.tolerances]
    speeds = [row.name for row in gating if row.early_stop == "median"]
    if not speeds or not all(row.early_stop for row in gating):
        return None
    most = [highest(row, baseline, policy) for row in gating if row.early_stop == "stalls"]
    stalls = min((_STALLS * each for each in most), default=1.0)
    steps = steps_to_settle([launch.steady.start for launch in baseline.launches])
    most_error = max(ENOUGH, policy.noise.launch.sd) if is_shared else math.inf

    def range_of(launch: Launch) -> PassingRange:
        there = policy.at([launch], baseline)
        difference = policy.difference([launch], baseline.launches)
        tolerance = min(there.tolerances[name] for name in speeds)
        # One that is beyond what it would be held to if its GPU were known is confirmed by another.
        closest = min((there.on_known.get(name, math.inf) for name in speeds), default=math.inf)
        found = passing_range(launch, difference, tolerance, closest)
        return replace(found, error=min(found.error, most_error), stalls=stalls, steps=steps)

    to_come = [_to_come(launch, day) for launch in baseline.launches]
    # GPUs that this run knows by now, whether the baseline does or not.
    known = policy.knowledge.units if policy.knowledge else ()
    units = [unit for unit in known if len(unit.devices) == len(to_come[0].ranks)]
    at_sites = {each.site: each for each in (*(_at(to_come[0], unit) for unit in units), *to_come)}
    return PassingRanges(
        at_sites={site: range_of(launch) for site, launch in at_sites.items()},
        on_hosts={host: range_of(_unseen(launch)) for host, launch in {each.host: each for each in to_come}.items()},
        elsewhere=range_of(_unseen(to_come[0], host=_UNSEEN)),
    )


def steps_to_settle(starts: Sequence[int]) -> int:
    """How many steps a launch needs, where the steady state of others of its case began at ``starts``."""
    return math.ceil(_SETTLED * median_low(starts))


def passing_range(to_come: Launch, difference: Difference, tolerance: float, closest: float = math.inf) -> PassingRange:
    """The same where and when ``to_come`` is, whatever its own step time, and its ``difference``.

    Beyond ``closest`` it needs another launch, also where it is within ``tolerance``.
    """
    expected = log_of(to_come) - difference.log
    limit = math.log1p(tolerance)
    return PassingRange(
        low=expected - limit,
        high=expected + min(passes_below(difference, tolerance), math.log1p(closest)),
        error=_WEIGHT * difference.error,
        drift=_DRIFT * limit,
    )


def _to_come(launch: Launch, day: str) -> Launch:
    """One of the same site on ``day``, as if its median were known."""
    seconds = (launch.median_step_seconds,) * _STEPS
    of_steps = ("waiting_seconds", "real_tokens", "allocated_bytes", "step_tokens")
    untold: dict[str, Any] = {"calibration": None, **dict.fromkeys(of_steps, ())}
    ranks = tuple(replace(rank, step_seconds=seconds, **untold) for rank in launch.ranks)
    return replace(launch, started_at=day, warmup_steps=1, ranks=ranks)


def _at(launch: Launch, unit: Unit) -> Launch:
    """One on the hardware of ``unit``."""
    places = zip(launch.ranks, unit.devices, unit.hosts, strict=True)
    return replace(launch, ranks=tuple(replace(rank, device=gpu, host=host, boot="") for rank, gpu, host in places))


def _unseen(launch: Launch, host: str = "") -> Launch:
    """One of its host, or of ``host``, on GPUs that no launch has had."""
    elsewhere: dict[str, Any] = {"host": host, "boot": ""} if host else {}
    return replace(launch, ranks=tuple(replace(rank, device=_UNSEEN, **elsewhere) for rank in launch.ranks))
