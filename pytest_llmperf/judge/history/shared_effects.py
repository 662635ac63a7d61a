"""What the cases of a run tell of the GPU that they share: taken off each of them, and a series of its own.

Step times of a machine kind are case + unit + rest, on logarithms, where a unit is what one run did on one site. The
two additive parts are found by median polish (Tukey 1977): up to half of the cases of a unit may have changed without
moving it. Cases at the chip's power limit and cases below it are polished apart, as GPUs differ in both. What all cases
have in common is not lost by that: it is the units' own series, in which a change has to be told from a new host by
its whole scatter, while a case that changes by itself is told from one by little of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pytest_llmperf.judge.history.timeline import Point, Timeline

#: Of what hosts, GPUs and days do to a case, what the other cases of its run do not tell: of 420 stored launches on
#: H200 hosts move 0.66 % (robust sd) before and 0.15 to 0.23 % after.
LEFT = 0.35

# Of fewer a change of their own would be taken for the GPU's.
_FEWEST_CASES = 4

# Medians of more move nothing that could be seen.
_MOST_CASES = 300

_ROUNDS = 8

# A clock below the highest by more than this share is the power limit's.
_LIMITED = 0.04

Unit = tuple[str, str]
"""A run and a site."""


@dataclass(frozen=True)
class SharedEffects:
    """Of one group of cases of one machine kind."""

    effects: Mapping[Unit, float]
    """Logarithms, of the units that enough cases were on."""
    points: tuple[Point, ...]
    """The same in the order of time."""
    began: tuple[str, ...]
    """Of each of ``points``, when its run began."""

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> SharedEffects:
        """What these cases share."""
        longest = sorted(timelines, key=lambda one: -len(one.points))[:_MOST_CASES]
        cells = [(number, unit_of(one, point), point) for number, one in enumerate(longest) for point in one.points]
        by_unit: dict[Unit, list[tuple[int, Point]]] = {}
        for number, unit, point in cells:
            by_unit.setdefault(unit, []).append((number, point))
        enough = {unit: each for unit, each in by_unit.items() if len({n for n, _ in each}) >= _FEWEST_CASES}
        effects = _polished(enough)
        began = {unit: min(longest[n].results[point.run].began for n, point in each) for unit, each in enough.items()}
        order = sorted(effects, key=lambda unit: (began[unit], unit))
        runs = tuple(dict.fromkeys(run for run, _ in order))
        places = {run: number for number, run in enumerate(runs)}
        points = tuple(_point(places[unit[0]], effects[unit], [point for _, point in enough[unit]]) for unit in order)
        return cls(effects, points, tuple(began[unit] for unit in order))

    def without(self, timeline: Timeline) -> Timeline:
        """``timeline`` without what its GPUs did, as far as that was told."""
        return replace(timeline, points=tuple(self._without(timeline, point) for point in timeline.points))

    def _without(self, timeline: Timeline, point: Point) -> Point:
        effect = self.effects.get(unit_of(timeline, point))
        return point if effect is None else replace(point, log=point.log - effect, left=LEFT)


def groups(timelines: Iterable[Timeline]) -> list[list[Timeline]]:
    """Those at the power limit, and those below it or of which that is not known."""
    several = list(timelines)
    clocks = [_clock(one) for one in several]
    highest = max(clocks, default=0.0)
    limited = [0 < clock < (1 - _LIMITED) * highest for clock in clocks]
    return [[one for one, is_limited in zip(several, limited, strict=True) if is_limited is of] for of in (True, False)]


def unit_of(timeline: Timeline, point: Point) -> Unit:
    """Where and when ``point`` was measured."""
    return timeline.results[point.run].run, point.site


def _clock(timeline: Timeline) -> float:
    told = [launch.sm_clock_mhz for result in timeline.results for launch in result.launches if launch.sm_clock_mhz]
    return median(told) if told else 0.0


def _polished(units: Mapping[Unit, Sequence[tuple[int, Point]]]) -> dict[Unit, float]:
    effects = dict.fromkeys(units, 0.0)
    for _ in range(_ROUNDS):
        of_case: dict[int, list[float]] = {}
        for unit, each in units.items():
            for number, point in each:
                of_case.setdefault(number, []).append(point.log - effects[unit])
        centres = {number: median(logs) for number, logs in of_case.items()}
        effects = {unit: median(point.log - centres[number] for number, point in each) for unit, each in units.items()}
    return effects


def _point(run: int, effect: float, points: Sequence[Point]) -> Point:
    one = points[0]
    return Point(run, effect, len(points), 0.0, one.host, one.site, one.day)
