"""Timeline: what one case took on one machine kind, run by run, with who shares what of its scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from pytest_llmperf.judge.history.change_points import Array, Scatter
from pytest_llmperf.judge.noise import Noise
from pytest_llmperf.records.past_result import PastLaunch, PastResult

# A median of absolute deviations as a standard deviation, and how much it tells beside that: as a third of the values.
_NORMAL, _EFFICIENCY = 1.4826, 0.37

# However quiet a series is, less of what is usual is not believed: it was quiet so far.
_LEAST_SCALE = 0.5


@dataclass(frozen=True)
class Point:
    """The launches of one run on one site: a GPU, or several that trained together."""

    run: int
    """Index of its result."""
    log: float
    """Of the step time."""
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
        points = [point for number, result in enumerate(results) for point in _points(number, result)]
        return cls(tuple(results), tuple(points))

    @property
    def logs(self) -> list[float]:
        return [point.log for point in self.points]

    @property
    def runs(self) -> list[int]:
        return [point.run for point in self.points]

    def scatter(self, noise: Noise) -> Scatter:
        """What is known of its scatter: ``noise``, moderated by what the series itself shows.

        It shows that by differences of one point and the next (von Neumann 1941), of which a change point moves one and
        no more: of the same site, what days and launches do; of different ones, what sites and hosts add.
        """
        import numpy as np  # noqa: PLC0415 - only who looks at a history pays for it

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
        if told:
            # Of what moves to another site does, days and launches are known already.
            return Scatter(((near, noise.launch.df + told), (outer * far, noise.host.df + seen)))
        return Scatter(((outer * near, noise.launch.df + seen), (outer * far, noise.host.df + seen)))

    def _scale(self, covariance: Array, pairs: Sequence[int], df: float) -> tuple[float, float]:
        """By what to multiply ``covariance``, and the degrees of freedom that the differences at ``pairs`` tell."""
        found = []
        for i in pairs:
            variance = covariance[i, i] + covariance[i + 1, i + 1] - 2 * covariance[i, i + 1]
            if variance > 0:
                found.append(abs(self.points[i + 1].log - self.points[i].log) / math.sqrt(variance))
        if not found:
            return 1.0, 0.0
        told = _EFFICIENCY * len(found)
        shown = (_NORMAL * median(found)) ** 2
        return max(_LEAST_SCALE, (df + told * shown) / (df + told)), told


def _same(labels: Sequence[str]) -> Array:
    """Who has the same label; who has none is alone."""
    import numpy as np  # noqa: PLC0415

    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    places = np.array([numbers[label] if label.strip() else -1 - index for index, label in enumerate(labels)])
    return (places[:, None] == places[None, :]).astype(float)


def _points(number: int, result: PastResult) -> list[Point]:
    if result.verdict == "invalid":
        return []
    sites: dict[str, list[PastLaunch]] = {}
    for launch in result.launches:
        sites.setdefault(launch.site, []).append(launch)
    return [
        Point(
            run=number,
            log=fmean(math.log(launch.step_seconds) for launch in launches),
            num_launches=len(launches),
            squared_error=fmean(launch.median_error**2 for launch in launches) / len(launches),
            host=launches[0].host,
            site=site,
            day=launches[0].started_at[:10],
        )
        for site, launches in sites.items()
    ]
