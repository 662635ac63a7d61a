"""Change points of a series whose scatter has known parts: E-divisive (Matteson and James 2014) in the metric of that
scatter, divided and merged as Hunter does it (Fleming et al. 2023); docs/explanation/history.md has the formulas.

All that ran on one host share its deviation. So a step is a generalised least squares estimate beside all others, and
between two hosts its variance is that of two hosts, however many nights there are. The candidate whose change is most
standard errors is divided at, if Student's t says so at a level that all share (Bonferroni); at the end the weakest
goes while one does not hold beside the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from pytest_llmperf.judge.stats import Noise, variance_of
from pytest_llmperf.records.result import PastResult
from pytest_llmperf.support import grouped
from pytest_llmperf.support.interpreter import Array, np, special

#: That a series which never changed shows a change point at all.
FALSE_ALARM = 0.01
#: Smaller changes are nobody's concern, however well they are known; logarithms.
LEAST_CHANGE = 0.005
#: On each side of a change point: one run may be off for reasons of its own.
LEAST_RUNS = 2
# A run that stands alone counts for no more than this many standard deviations from those around it.
_FAR = 3.0
_AROUND = 2
# Sizes of changes that are nearer to each other, as a fraction, are one.
_ROUNDING = 1e-6
_MOST_CHANGES = 20


@dataclass(frozen=True)
class Covariance:
    """The covariance of a series in parts that add up, each with the degrees of freedom by which its size is known."""

    parts: tuple[tuple[Array, float], ...]

    @property
    def total(self) -> Array:
        return sum(matrix for matrix, _ in self.parts)

    def variance(self, weights: Array) -> tuple[float, float]:
        """Of a weighted sum of the series, and its degrees of freedom (Satterthwaite 1946)."""
        return variance_of((float(weights @ matrix @ weights), df) for matrix, df in self.parts)


@dataclass(frozen=True)
class ChangePoint:
    index: int
    """Of the first value after it."""
    log: float
    """By how much: a logarithm, positive where it is slower."""
    error: float
    probability: float
    """Of so large a change, where there is none, at one candidate alone."""


@dataclass(frozen=True)
class Level:
    """The values between two change points."""

    start: int
    end: int
    log: float
    error: float
    df: float


def find_changes(logs: Sequence[float], scatter: Covariance, runs: Sequence[int]) -> list[ChangePoint]:
    """``runs``: of each value the number of its run; what is of one run stays together."""
    values = _calmed(np.array(logs, dtype=float), np.sqrt(np.diag(scatter.total)))
    precision = np.linalg.inv(scatter.total)
    # At which a run begins that has enough runs on both sides.
    order = list(dict.fromkeys(runs))
    candidates = [runs.index(run) for run in order][LEAST_RUNS : len(order) - LEAST_RUNS + 1]
    found: list[int] = []
    while len(found) < _MOST_CHANGES:
        apart = [
            one
            for one in candidates
            if all(len(set(runs[min(one, other) : max(one, other)])) >= LEAST_RUNS for other in found)
        ]
        best = _best(values, precision, found, apart)
        if best is None or not _holds(_change(values, precision, scatter, found, best), len(candidates)):
            break
        found = sorted([*found, best])
    starts = found
    while weak := [one for one in _changes(values, precision, scatter, starts) if not _holds(one, len(candidates))]:
        starts.remove(max(weak, key=lambda change: change.probability).index)
    # Two runs that agree at an end are in the minority around them: how far they are off is told by them alone.
    return _changes(_calmed_between(logs, scatter, starts), precision, scatter, starts)


def levels_between(logs: Sequence[float], scatter: Covariance, changes: Sequence[ChangePoint]) -> list[Level]:
    """The levels where ``changes``, in their order, are known: one more than these."""
    starts = [0, *(change.index for change in changes)]
    values, precision = _calmed_between(logs, scatter, starts[1:]), np.linalg.inv(scatter.total)
    parts = list(zip(starts, [*starts[1:], len(values)], strict=True))
    design = np.array([[float(start <= index < end) for start, end in parts] for index in range(len(values))])
    weights = np.linalg.solve(design.T @ precision @ design, design.T @ precision)
    found = []
    for (start, end), row in zip(parts, weights, strict=True):
        variance, df = scatter.variance(row)
        found.append(Level(start, end, float(row @ values), variance**0.5, df))
    return found


def _calmed(values: Array, spreads: Array) -> Array:
    """What stands alone drawn towards its neighbours; a change, which the next values share, stays as it is."""
    window, most = 2 * _AROUND + 1, max(0, len(values) - 2 * _AROUND - 1)
    starts = [min(max(0, index - _AROUND), most) for index in range(len(values))]
    plain = values.tolist()
    middles = np.array([median(plain[start : start + window]) for start in starts])
    return np.clip(values, middles - _FAR * spreads, middles + _FAR * spreads)


def _calmed_between(logs: Sequence[float], scatter: Covariance, starts: Sequence[int]) -> Array:
    """The same within each level by itself, whose first values are not drawn back to the level before."""
    values, spreads = np.array(logs, dtype=float), np.sqrt(np.diag(scatter.total))
    levels = zip(np.split(values, starts), np.split(spreads, starts), strict=True)
    return np.concatenate([_calmed(*parts) for parts in levels])


def _projected(precision: Array, starts: Sequence[int]) -> Array:
    """The precision of what is left once each level's mean is taken off."""
    num = len(precision)
    design = np.array([[float(index >= start) for start in (0, *starts)] for index in range(num)])
    weighted = precision @ design
    return precision - weighted @ np.linalg.solve(design.T @ weighted, weighted.T)


def _best(values: Array, precision: Array, found: Sequence[int], candidates: Sequence[int]) -> int | None:
    if not candidates:
        return None
    left = _projected(precision, found)
    # Sums over all values from each index on, in both directions: of every step at once.
    towards = np.cumsum((left @ values)[::-1])[::-1]
    known = np.diag(np.cumsum(np.cumsum(left[::-1, ::-1], axis=0), axis=1)[::-1, ::-1])
    usable = [one for one in candidates if known[one] > 0]
    sizes = {one: towards[one] ** 2 / known[one] for one in usable}
    # Of those that rounding alone tells apart, the first: the same series on another level changes at the same place.
    alike = max(sizes.values(), default=0.0) * (1 - _ROUNDING)
    return next((one for one, size in sizes.items() if size >= alike), None)


def _change(values: Array, precision: Array, scatter: Covariance, others: Sequence[int], index: int) -> ChangePoint:
    step = (np.arange(len(values)) >= index).astype(float)
    weights = _projected(precision, others) @ step
    weights /= weights @ step
    log = float(weights @ values)
    variance, df = scatter.variance(weights)
    error = variance**0.5
    return ChangePoint(index, log, error, 2 * float(special.stdtr(min(df, 1e6), -abs(log) / error)) if error else 1.0)


def _holds(change: ChangePoint, num_candidates: int) -> bool:
    return change.probability * num_candidates < FALSE_ALARM and abs(change.log) >= LEAST_CHANGE


def _changes(values: Array, precision: Array, scatter: Covariance, starts: Sequence[int]) -> list[ChangePoint]:
    return [_change(values, precision, scatter, [each for each in starts if each != one], one) for one in starts]


# Timeline: what one case took on one machine kind, run by run, with who shares what of its scatter.

#: A median of absolute deviations as a standard deviation, and how much it tells beside that: as a third of the values.
NORMAL, EFFICIENCY = 1.4826, 0.37
# However quiet a series is, less of what is usual is not believed: it was quiet so far.
_LEAST_SCALE = 0.5


@dataclass(frozen=True)
class Point:
    """The launches of one run on one site: a GPU, or several that trained together."""

    run: int
    """Index of its result."""
    log: float
    num_launches: int
    squared_error: float
    """Of that by what its launches do not know of their own medians."""
    host: str
    site: str
    day: str
    left: float = 1.0
    """The share of what hosts, GPUs and days do that is still in it, where other cases told of the rest."""


@dataclass(frozen=True)
class Timeline:
    """In the order of time."""

    results: tuple[PastResult, ...]
    """None where its points are of no case."""
    points: tuple[Point, ...]

    @classmethod
    def of(cls, results: Sequence[PastResult]) -> Timeline:
        """Of results of one case; what is invalid is shown and not counted."""
        points = [
            Point(
                run=number,
                log=fmean(math.log(launch.step_seconds) for launch in launches),
                num_launches=len(launches),
                squared_error=fmean(launch.median_error**2 for launch in launches) / len(launches),
                host=launches[0].host,
                site=site,
                day=launches[0].started_at[:10],
            )
            for number, result in enumerate(results)
            if result.verdict != "invalid"
            for site, launches in grouped((launch.site, launch) for launch in result.launches).items()
        ]
        return cls(tuple(results), tuple(points))

    @property
    def logs(self) -> list[float]:
        return [point.log for point in self.points]

    @property
    def runs(self) -> list[int]:
        return [point.run for point in self.points]

    def scatter(self, noise: Noise) -> Covariance:
        """What is known of its scatter: ``noise``, moderated by what the series itself shows. It shows that by
        differences of one point and the next (von Neumann 1941), of which a change point moves one and no more: of the
        same site, what days and launches do; of different ones, what sites and hosts add."""
        shares = {name: _same([getattr(point, name) for point in self.points]) for name in ("host", "site")}
        days = _same([f"{point.site} {point.day}" if point.site else "" for point in self.points])
        launches = noise.launch.sd**2 / np.array([point.num_launches for point in self.points])
        errors = np.array([point.squared_error for point in self.points])
        parts = np.array([point.left for point in self.points])
        left = np.outer(parts, parts)
        near = left * noise.session.sd**2 * days + np.diag(launches + np.maximum(0.0, errors - launches))
        far = left * (noise.host.sd**2 * shares["host"] + noise.site.sd**2 * shares["site"])
        beside = [a.site == b.site for a, b in pairwise(self.points)]
        inner, told = self._scale(near, [i for i, is_same in enumerate(beside) if is_same], noise.launch.df)
        near = inner * near
        outer, seen = self._scale(near + far, [i for i, is_same in enumerate(beside) if not is_same], noise.host.df)
        # Of what moves to another site does, days and launches are known already.
        near, known = (near, told) if told else (outer * near, seen)
        return Covariance(((near, noise.launch.df + known), (outer * far, noise.host.df + seen)))

    def _scale(self, covariance: Array, pairs: Sequence[int], df: float) -> tuple[float, float]:
        """By what to multiply ``covariance``, and the degrees of freedom that the differences at ``pairs`` tell."""
        found = []
        for i in pairs:
            variance = covariance[i, i] + covariance[i + 1, i + 1] - 2 * covariance[i, i + 1]
            if variance > 0:
                found.append(abs(self.points[i + 1].log - self.points[i].log) / math.sqrt(variance))
        if not found:
            return 1.0, 0.0
        told = EFFICIENCY * len(found)
        shown = (NORMAL * median(found)) ** 2
        return max(_LEAST_SCALE, (df + told * shown) / (df + told)), told


def _same(labels: Sequence[str]) -> Array:
    """Who has the same label; who has none is alone."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    places = np.array([numbers[label] if label.strip() else -1 - index for index, label in enumerate(labels)])
    return (places[:, None] == places[None, :]).astype(float)
