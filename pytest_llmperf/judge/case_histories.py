"""The histories of all cases: each without what the GPUs of its runs did, as far as the other cases tell of that."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from pytest_llmperf.judge import change_points
from pytest_llmperf.judge.change_points import ChangePoint, Point, Timeline, find_changes
from pytest_llmperf.judge.stats import Noise, quantile
from pytest_llmperf.records.calibration import ALL_REDUCE, Calibration
from pytest_llmperf.records.result import PastResult, is_choice
from pytest_llmperf.support import codec, grouped
from pytest_llmperf.support.formats import percent

# CaseHistory: the levels of one case over its runs, and what was different where it went from one to the next.

# With fewer there is no change point that could be shown.
_LEAST_POINTS = 2 * change_points.LEAST_RUNS
# Of a step with another host: hosts seldom differ by so much; and so many errors of what days and launches do.
_LEAST_STEP, _CASE_HISTORY_SEEN = math.log1p(0.03), 3.0
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
    """Where the rate changed when the case moved to hosts that it had not been on, and left all others for good. Hosts
    differ, so it is no change point; what else changed then cannot be told from the host either."""

    began: str
    rate: float
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
        return self.latest.id

    @property
    def latest(self) -> PastResult:
        """It has the id, digest, machine and project of all."""
        return self.results[-1]

    @property
    def latest_change(self) -> Segment | None:
        """The segment that the latest change point begins."""
        return self.segments[-1] if len(self.segments) > 1 else None

    @property
    def latest_rate(self) -> float:
        """How much faster or slower it became there, to a millionth: last digits differ from computer to computer, and
        would be an order. 0 where nobody can tell."""
        latest = self.latest_change
        return round(latest.change.rate, 6) if latest and latest.change else 0.0

    @property
    def is_short(self) -> bool:
        """Whether it has no change point, and too few runs for one of its rate; counts tell of one by two runs."""
        return len(self.segments) == 1 and len(self.segments[0].results) < _LEAST_POINTS


def differences(before: PastResult, after: PastResult) -> tuple[str, ...]:
    """What may explain that ``after`` is not as ``before``, those first that people change."""
    told = after.versions.keys() & before.versions.keys()
    names = [name for name in dict.fromkeys([*after.versions, *before.versions]) if name in told or not is_choice(name)]
    pairs = [("revision", before.revision or "unknown", after.revision or "unknown")]
    pairs += [(name, before.versions.get(name, "none"), after.versions.get(name, "none")) for name in names]
    lines = [f"{name}: {then} -> {now}" for name, then, now in pairs if then != now]
    both = [(name, before.counts[name], after.counts[name]) for name in before.counts if name in after.counts]
    lines += [f"{name}: {then:g} -> {now:g}" for name, then, now in both if then != now]
    hosts, sites = (
        [{getattr(launch, place) for launch in one.launches} for one in (before, after)] for place in ("host", "site")
    )
    if hosts[0] != hosts[1]:
        lines.append(f"host: {' -> '.join(', '.join(sorted(each)) or 'unknown' for each in hosts)}")
    elif sites[0] != sites[1]:
        lines.append("GPU: another of the same host")
    # By how much work that depends on nothing under test is slower on the GPUs of ``after``.
    if before.calibrations.keys() != after.calibrations.keys():
        were, are = _seconds(before), _seconds(after)
        for work, maker in are:
            if (work, maker) in were and work != ALL_REDUCE:
                lines.append(f"calibration, seconds of {work}: {percent(are[work, maker] / were[work, maker] - 1)}")
    return tuple(lines)


def _seconds(result: PastResult) -> dict[tuple[str, str], float]:
    """Mean over its GPUs, by work and by what made it: others are not comparable."""
    every = (codec.read(Calibration, each) for each in result.calibrations.values())
    found = grouped(((work, made.maker_of(work)), one) for made in every for work, one in made.seconds.items())
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
        least = max(_LEAST_STEP, _CASE_HISTORY_SEEN * sd * math.sqrt(sum(1 / count for count in counts)))
        is_told = any(abs(change.index - middle) <= 1 for change in changes)
        if min(counts) >= change_points.LEAST_RUNS and abs(log) >= least and not is_told:
            before, after = (timeline.results[side[place].run] for side, place in zip(sides, (-1, 0), strict=True))
            found.append(HostStep(after.began, math.expm1(-log), differences(before, after)))
    return tuple(found)


def _is_draft(result: PastResult) -> bool:
    """Whether files differed from its commit."""
    return result.revision.endswith("+")


def recounted(timeline: Timeline) -> Iterator[int]:
    """Where a step is made of other numbers of operators, kernels, copies or waits than before. Somebody's drafts begin
    no change, where runs of commits are there to be told: what they do counts once it is committed."""
    last: Mapping[str, float] = {}
    has_commits = any(result.revision and not _is_draft(result) for result in timeline.results)
    for index, point in enumerate(timeline.points):
        result = timeline.results[point.run]
        if has_commits and _is_draft(result):
            continue
        if any(result.counts[name] != last[name] for name in result.counts if name in last):
            yield index
        last = {**last, **result.counts}


def segments(
    timeline: Timeline, noise: Noise, changes: Sequence[ChangePoint], shared: Mapping[int, float], *, timed: bool = True
) -> tuple[Segment, ...]:
    """Those between ``changes``; ``shared``: by a change's index what of its logarithm all cases have in common."""
    found: list[Segment] = []
    for number, level in enumerate(change_points.levels_between(timeline.logs, timeline.scatter(noise), changes)):
        results = tuple(timeline.results[run] for run in dict.fromkeys(timeline.runs[level.start : level.end]))
        times = quantile(_UPPER, level.df)
        change = None
        if number and timed:
            point, part = changes[number - 1], shared.get(changes[number - 1].index)
            rate, low, high = (math.expm1(-point.log + way * times * point.error) for way in (0, -1, 1))
            change = Change(rate, low, high, None if part is None else math.expm1(-part))
        before = found[-1].results if found else ()
        last = next((one for one in reversed(before) if not _is_draft(one)), before[-1]) if before else None
        step, low, high = (math.exp(level.log + way * times * level.error) for way in (0, -1, 1))
        found.append(Segment(results, step, low, high, change, differences(last, results[0]) if last else ()))
    return tuple(found)


# What the cases of a run tell of the GPU that they share: taken off each of them, and a series of its own.

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

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> SharedEffects:
        longest = sorted(timelines, key=lambda one: -len(one.points))[:_MOST_CASES]
        by_unit = grouped((unit_of(one, each), (n, each)) for n, one in enumerate(longest) for each in one.points)
        enough = {unit: each for unit, each in by_unit.items() if len({n for n, _ in each}) >= _FEWEST_CASES}
        # Median polish.
        effects = dict.fromkeys(enough, 0.0)
        for _ in range(_ROUNDS):
            of_case = grouped((n, point.log - effects[unit]) for unit, each in enough.items() for n, point in each)
            centres = {number: median(logs) for number, logs in of_case.items()}
            effects = {unit: median(point.log - centres[n] for n, point in each) for unit, each in enough.items()}
        began = {unit: min(longest[n].results[point.run].began for n, point in each) for unit, each in enough.items()}
        order = sorted(effects, key=lambda unit: (began[unit], unit))
        places = {run: number for number, run in enumerate(dict.fromkeys(run for run, _ in order))}
        points = []
        for unit in order:
            one_point = enough[unit][0][1]
            where = (one_point.host, one_point.site, one_point.day)
            points.append(Point(places[unit[0]], effects[unit], len(enough[unit]), 0.0, *where))
        return cls(effects, tuple(points), tuple(began[unit] for unit in order))

    def without(self, timeline: Timeline) -> Timeline:
        """``timeline`` without what its GPUs did, as far as that was told."""
        units = [(self.effects.get(unit_of(timeline, point)), point) for point in timeline.points]
        points = (point if off is None else replace(point, log=point.log - off, left=LEFT) for off, point in units)
        return replace(timeline, points=tuple(points))


def groups(timelines: Iterable[Timeline]) -> list[list[Timeline]]:
    """Those at the power limit, and those below it or of which that is not known."""
    clocks = []
    for one in (several := list(timelines)):
        told = [launch.sm_clock_mhz for result in one.results for launch in result.launches if launch.sm_clock_mhz]
        clocks.append(median(told) if told else 0.0)
    limited = [0 < clock < (1 - _LIMITED) * max(clocks) for clock in clocks]
    return [[one for one, is_limited in zip(several, limited, strict=True) if is_limited is of] for of in (True, False)]


def unit_of(timeline: Timeline, point: Point) -> Unit:
    """Where and when ``point`` was measured."""
    return timeline.results[point.run].run, point.site


#: Of a case, the newest ones: its covariance has the square of them, and a second's work. Nights of five years.
MOST_RUNS = 2000
# Of its standard errors: what a case and its GPUs' other cases did in opposite directions is no change of the case.
_SEEN = 3.0


@dataclass(frozen=True)
class Scattering:
    noise: Noise
    are_gpus: bool = True
    """Whether what cases of a run share is their hardware's; a busy CPU moves each of them at its own time."""


def histories(
    results: Sequence[PastResult], scattering: Mapping[str, Scattering], asked: Container[tuple[str, str]] | None = None
) -> list[CaseHistory]:
    """Of each case, by its newest ``MOST_RUNS``; other settings and other machine kinds are other cases. ``results``
    are in the order of time. ``scattering``: by machine kind; ``asked``: machine kinds and digests of the cases that
    are wanted, else all. What the others have taken tells of the GPUs all the same."""
    cases = grouped(((result.machine, result.digest, result.project), result) for result in results)
    timelines = {case: Timeline.of(several[-MOST_RUNS:]) for case, several in cases.items()}
    found = dict[tuple[str, str, str], CaseHistory]()
    for machine, known in scattering.items():
        for group in groups([one for case, one in timelines.items() if case[0] == machine]):
            shared = SharedEffects.of(group if known.are_gpus else ())
            # The changes of all of them, each with the time at which a run began it.
            common, changes = Timeline((), shared.points), list[tuple[str, ChangePoint]]()
            if common.points:
                levels = find_changes(common.logs, common.scatter(known.noise), common.runs)
                changes = [(shared.began[change.index], change) for change in levels]
            for one in group:
                case = (machine, one.results[0].digest, one.results[0].project)
                if asked is None or case[:2] in asked:
                    found[case] = _history(one, known, shared, changes)
    return [found[case] for case in cases if case in found]


def _history(
    timeline: Timeline, known: Scattering, effects: SharedEffects, common_changes: Sequence[tuple[str, ChangePoint]]
) -> CaseHistory:
    if not timeline.points:
        return CaseHistory(timeline.results, ())
    if not known.are_gpus:  # times are noise there, and exact counts tell alone
        counted = [ChangePoint(index, 0.0, 0.0, 0.0) for index in recounted(timeline)]
        return CaseHistory(timeline.results, segments(timeline, known.noise, counted, {}, timed=False))
    alone = effects.without(timeline)
    changes = {change.index: change for change in find_changes(alone.logs, alone.scatter(known.noise), alone.runs)}
    shared: dict[int, float] = {}
    # The changes of all cases, by where they are in this series, from which they have been taken off.
    began = [timeline.results[point.run].began for point in alone.points]
    told = [point.left < 1 for point in alone.points]
    for at, common in common_changes:
        index = bisect_left(began, at)
        if 0 < index < len(told) and told[index - 1] and told[index]:
            near = next((each for each in (index, index - 1, index + 1) if each in changes), index)
            mine, shared[near] = changes.get(near, ChangePoint(near, 0.0, 0.0, 1.0)), common.log
            least = min(mine.probability, common.probability)
            changes[near] = ChangePoint(near, mine.log + common.log, math.hypot(mine.error, common.error), least)
    kept = [
        change
        for change in changes.values()
        if change.index not in shared or abs(change.log) >= max(change_points.LEAST_CHANGE, _SEEN * change.error)
    ]
    kept.sort(key=lambda change: change.index)
    own_segments = segments(timeline, known.noise, kept, shared)
    return CaseHistory(timeline.results, own_segments, host_steps(timeline, known.noise, kept))
