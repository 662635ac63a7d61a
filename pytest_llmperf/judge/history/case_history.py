"""CaseHistory: the levels of one case over its runs, and what was different where it went from one to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from pytest_llmperf.judge.history.change_points import LEAST_RUNS, ChangePoint, Levels
from pytest_llmperf.judge.history.timeline import Timeline
from pytest_llmperf.judge.noise import Noise
from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.records.calibration import ALL_REDUCE, Calibration
from pytest_llmperf.records.past_result import PastResult
from pytest_llmperf.support.formats import percent

# With fewer there is no change point that could be shown.
_LEAST_POINTS = 2 * LEAST_RUNS

# Of a step with another host: hosts seldom differ by so much; and so many errors of what days and launches do.
_LEAST_STEP, _SEEN = math.log1p(0.03), 3.0

# Of an interval of 95 %.
_UPPER = 0.975


@dataclass(frozen=True)
class Change:
    """Of the rate, from one segment to the next, as fractions."""

    rate: float
    low: float
    high: float
    """Between which it is, nineteen times in twenty."""
    shared: float | None = None
    """What of it all cases of these runs have in common, a driver's or a library's say; ``None``: it is its own."""


@dataclass(frozen=True)
class Segment:
    """Runs between two change points."""

    results: tuple[PastResult, ...]
    """Those that count."""
    step_seconds: float
    low: float
    high: float
    """Between which the mean of such runs is, nineteen times in twenty, on whatever hosts."""
    change: Change | None
    """Since the segment before; ``None`` of the first one, and where counts alone tell."""
    different: tuple[str, ...]
    """Between the last run of the segment before and the first of this one, ``name: then -> now``."""

    def rate(self, step_seconds: float) -> float | None:
        """Tokens/s per GPU at this step time; ``None`` where its tokens were not told."""
        last = self.results[-1]
        return last.tokens_per_step / last.ranks / step_seconds if last.tokens_per_step else None


@dataclass(frozen=True)
class HostStep:
    """Where the rate changed when the case moved to hosts that it had not been on, and left all others for good.

    Hosts differ, so it is no change point; what else changed then cannot be told from the host either.
    """

    began: str
    rate: float
    """Change of it, as a fraction."""
    different: tuple[str, ...]


@dataclass(frozen=True)
class CaseHistory:
    """Of one case on one machine kind, with the same settings."""

    results: tuple[PastResult, ...]
    segments: tuple[Segment, ...]
    """None where no run counts."""
    steps: tuple[HostStep, ...] = ()
    """In the order of time."""

    @property
    def id(self) -> str:
        return self.results[-1].id

    @property
    def machine(self) -> str:
        return self.results[-1].machine

    @property
    def project(self) -> str:
        return self.results[-1].project

    @property
    def digest(self) -> str:
        return self.results[-1].digest

    @property
    def latest_change(self) -> Segment | None:
        """The segment that the latest change point begins."""
        return self.segments[-1] if len(self.segments) > 1 else None

    @property
    def is_short(self) -> bool:
        """Whether it has too few runs for any change point."""
        return sum(len(segment.results) for segment in self.segments) < _LEAST_POINTS


def differences(before: PastResult, after: PastResult) -> tuple[str, ...]:
    """What may explain that ``after`` is not as ``before``, those first that people change."""
    lines = []
    if before.revision != after.revision:
        lines.append(f"revision: {before.revision or 'unknown'} -> {after.revision or 'unknown'}")
    names = dict.fromkeys([*after.versions, *before.versions])
    for name in names:
        then, now = before.versions.get(name, "none"), after.versions.get(name, "none")
        if then != now:
            lines.append(f"{name}: {then} -> {now}")
    both = [name for name in before.counts if name in after.counts]
    pairs = ((name, before.counts[name], after.counts[name]) for name in both)
    lines += [f"{name}: {then:g} -> {now:g}" for name, then, now in pairs if then != now]
    left, entered = _hosts(before), _hosts(after)
    if left != entered:
        lines.append(f"host: {left} -> {entered}")
    elif {launch.site for launch in before.launches} != {launch.site for launch in after.launches}:
        lines.append("GPU: another of the same host")
    return (*lines, *_calibrations(before, after))


def _calibrations(before: PastResult, after: PastResult) -> Iterator[str]:
    """By how much work that depends on nothing under test is slower on the GPUs of ``after``."""
    if before.calibrations.keys() == after.calibrations.keys():
        return
    then, now = _seconds(before), _seconds(after)
    for work, maker in now:
        if (work, maker) in then and work != ALL_REDUCE:
            slower = now[work, maker] / then[work, maker] - 1
            yield f"calibration, seconds of {work}: {percent(slower)}"


def _seconds(result: PastResult) -> dict[tuple[str, str], float]:
    """Mean over its GPUs, by work and by what made it: others are not comparable."""
    found: dict[tuple[str, str], list[float]] = {}
    for made in map(Calibration.from_dict, result.calibrations.values()):
        for work, seconds in made.seconds.items():
            found.setdefault((work, made.maker_of(work)), []).append(seconds)
    return {key: fmean(several) for key, several in found.items()}


def host_steps(timeline: Timeline, noise: Noise, changes: Sequence[ChangePoint]) -> tuple[HostStep, ...]:
    """Those of ``timeline`` that are larger than what passes, and no change point already."""
    last = {point.host: number for number, point in enumerate(timeline.points)}
    starts, reach = [0], -1
    for number, point in enumerate(timeline.points):
        if number > reach >= 0:  # none of the hosts so far comes back
            starts.append(number)
        reach = max(reach, last[point.host])
    ends = [*starts[1:], len(timeline.points)]
    sd, found = math.hypot(noise.session.sd, noise.launch.sd), list[HostStep]()
    for (start, middle), end in zip(pairwise(starts), ends[1:], strict=True):
        sides = timeline.points[start:middle], timeline.points[middle:end]
        counts = [len({point.run for point in side}) for side in sides]
        log = median(point.log for point in sides[1]) - median(point.log for point in sides[0])
        least = max(_LEAST_STEP, _SEEN * sd * math.sqrt(sum(1 / count for count in counts)))
        is_told = any(abs(change.index - middle) <= 1 for change in changes)
        if min(counts) >= LEAST_RUNS and abs(log) >= least and not is_told:
            before, after = (timeline.results[side[place].run] for side, place in zip(sides, (-1, 0), strict=True))
            found.append(HostStep(after.began, math.expm1(-log), differences(before, after)))
    return tuple(found)


def _hosts(result: PastResult) -> str:
    return ", ".join(sorted({launch.host for launch in result.launches})) or "unknown"


def recounted(timeline: Timeline) -> Iterator[int]:
    """Where a step is made of other numbers of operators, kernels, copies or waits than before."""
    last: Mapping[str, float] = {}
    for index, point in enumerate(timeline.points):
        counts = timeline.results[point.run].counts
        if any(counts[name] != last[name] for name in counts if name in last):
            yield index
        last = {**last, **counts}


def segments(
    timeline: Timeline, levels: Levels, shared: Mapping[int, float], *, are_times: bool = True
) -> tuple[Segment, ...]:
    """Those of ``timeline``; ``shared``: by a change's index what of its logarithm all cases have in common."""
    found: list[Segment] = []
    for number, level in enumerate(levels.levels):
        runs = dict.fromkeys(timeline.runs[level.start : level.end])
        results = tuple(timeline.results[run] for run in runs)
        reach = quantile(_UPPER, level.df) * level.error
        change = levels.changes[number - 1] if number and are_times else None
        found.append(
            Segment(
                results=results,
                step_seconds=math.exp(level.log),
                low=math.exp(level.log - reach),
                high=math.exp(level.log + reach),
                change=_change(change, level.df, shared) if change else None,
                different=differences(found[-1].results[-1], results[0]) if found else (),
            )
        )
    return tuple(found)


def _change(change: ChangePoint, df: float, shared: Mapping[int, float]) -> Change:
    reach = quantile(_UPPER, df) * change.error
    part = shared.get(change.index)
    return Change(
        rate=math.expm1(-change.log),
        low=math.expm1(-change.log - reach),
        high=math.expm1(-change.log + reach),
        shared=None if part is None else math.expm1(-part),
    )
