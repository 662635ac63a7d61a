"""Creep: losses that are each within tolerance and add up, since somebody last said why. Pure.

Each figure is held against the best that was accepted since the last reason (docs/decisions/0061). The best of many
noisy figures is too good, so it is the mean of some neighbours, and a loss has to be beyond the noise as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import Accepted
from pytest_llmperf.judge.noise import Noise, Spread
from pytest_llmperf.judge.phase_checks import alike
from pytest_llmperf.judge.policy import METRICS, PHASES
from pytest_llmperf.judge.scaling_efficiency import METRIC as EFFICIENCY
from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Check
from pytest_llmperf.support.formats import in_sentence, percent

# Acceptances that make up a level: a sudden gain is one, a noisy one is known by several.
_WINDOWS = (1, 2, 3, 5, 8, 13)

# That noise alone takes one level no further from another; each is compared with many.
_SURE = 1 - 1e-4

# What repeats itself shows its own noise, and none is believed of it before.
_STEADY = Spread(0.0, 6.0)

# Of the variance of one value: that of its distance from the middle of its neighbours, which no steady slope moves.
_BETWEEN_NEIGHBOURS = 1.5


def since_reason(history: Sequence[Accepted]) -> Sequence[Accepted]:
    """The acceptances from the last one on that has a reason; all of them without one."""
    return history[max((number for number, entry in enumerate(history) if entry.reason), default=0) :]


def best(history: Sequence[Accepted], metric: str) -> float | None:
    """The best figure that was accepted since the last reason."""
    chosen = max if metric == EFFICIENCY or METRICS[metric].higher_is_better else min
    return chosen((entry.metrics[metric] for entry in since_reason(history) if metric in entry.metrics), default=None)


def creep(baseline: Baseline, checks: Sequence[Check], launches: Sequence[Launch], noise: Noise) -> tuple[str, ...]:
    """A line for each metric of ``launches`` that its gate lets pass, and that has left the best by more than that."""
    return tuple(filter(None, (_crept(baseline, check, launches, noise) for check in checks)))


def _crept(baseline: Baseline, check: Check, launches: Sequence[Launch], noise: Noise) -> str:
    if not check.tolerance or check.verdict not in ("pass", "inconclusive", "improved"):
        return ""
    entries = list(_figures(baseline, check, launches))
    level = _best_level(check, [value for _, value in entries], _usual(baseline, check, launches, noise))
    if level is None:
        return ""
    first, size = entries[level.start][0], level.size
    was, now = in_sentence(level.mean, check.unit), in_sentence(check.value, check.unit)
    whose = f"{was} of {first.recorded_at[:10]}" + f" (mean of {size} acceptances)" * (size > 1)
    since = " since the last reason" if since_reason(baseline.history)[0].reason else ""
    change = percent(check.value / level.mean - 1 if level.mean else None)
    return f"creep: {check.metric} {now} is {change} from the best accepted{since}, {whose}"


def _figures(baseline: Baseline, check: Check, launches: Sequence[Launch]) -> Iterator[tuple[Accepted, float]]:
    """What was accepted of a metric since the last reason, oldest first."""
    since = since_reason(baseline.history)
    if check.metric not in PHASES:
        yield from ((entry, entry.metrics[check.metric]) for entry in since if check.metric in entry.metrics)
        return
    # Launches that began in another way are none to be held against, and an acceptance does not say how its own did.
    for entry, own in reversed(baseline.held[: len(since)]):
        told = [one for one in own if any(alike(check.metric, one, each) for each in launches)]
        if told:
            yield entry, PHASES[check.metric].of(told)


def _usual(baseline: Baseline, check: Check, launches: Sequence[Launch], noise: Noise) -> Spread:
    """How a figure scatters from one acceptance to the next when nothing changed, as a fraction."""
    metric = METRICS.get(check.metric)
    if check.metric != EFFICIENCY and (metric is None or metric.rule != "speed"):
        return _STEADY
    everyone = (*baseline.launches, *launches)
    parts = [noise.launch, noise.session]
    parts += [noise.site] if len({launch.site for launch in everyone}) > 1 else []
    parts += [noise.host] if len({launch.host for launch in everyone}) > 1 else []
    return Spread(math.hypot(*(part.sd for part in parts)), min(part.df for part in parts))


@dataclass(frozen=True)
class _Level:
    start: int
    size: int
    mean: float
    beyond: float
    """By how much the figure is further from it than it may be."""


def _best_level(check: Check, past: Sequence[float], usual: Spread) -> _Level | None:
    """The neighbours among the figures of the ``past`` that ``check`` is furthest beyond; ``None``: it is beyond none.

    It has to be beyond what its gate allows; and its own level, of the last acceptances and it, beyond their noise.
    """
    residuals = [
        (b - (a + c) / 2) ** 2 / _BETWEEN_NEIGHBOURS for a, b, c in zip(past, past[1:], past[2:], strict=False)
    ]
    values, sign = (*past, check.value), 1 if check.higher_is_better else -1
    # What moved by more than its gate allows has begun anew: such a step is no noise.
    moved = [0, *(n for n, pair in enumerate(pairwise(past), 1) if max(pair) - min(pair) > _allowed(check, max(pair)))]
    levels = []
    for size in _WINDOWS:
        for start in range(len(past) - size + 1):
            mean, own = fmean(past[start : start + size]), residuals[max(n for n in moved if n <= start) :]
            beyond = sign * (mean - check.value) - _allowed(check, mean)
            if beyond <= 0:
                continue
            variance = (usual.df * (usual.sd * mean) ** 2 + math.fsum(own)) / (usual.df + len(own))
            far = quantile(_SURE, usual.df + len(own) / 2) * math.sqrt(variance)
            recent = (recent for recent in _WINDOWS if recent <= len(values) - start - size)
            if any(sign * (mean - fmean(values[-each:])) > far * math.sqrt(1 / size + 1 / each) for each in recent):
                levels.append(_Level(start, size, mean, beyond))
    return max(levels, key=lambda level: level.beyond, default=None)


def _allowed(check: Check, level: float) -> float:
    """How much worse than ``level`` passes."""
    tolerance = check.tolerance or 0.0
    metric = METRICS.get(check.metric) or PHASES.get(check.metric)
    if check.higher_is_better:
        return level * tolerance / (1 + tolerance)
    # Of a metric without a row its own limit says what is next to nothing.
    slack = metric.slack if metric else (check.limit or 0.0) - (check.baseline or 0.0)
    return max(level * tolerance, slack)
