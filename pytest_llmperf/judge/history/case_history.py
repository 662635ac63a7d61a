"""CaseHistory: the levels of one case over its runs, and what was different where it went from one to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_llmperf.judge.history.change_points import LEAST_RUNS, ChangePoint, Levels
from pytest_llmperf.judge.history.timeline import Timeline
from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.records.past_result import PastResult

# With fewer there is no change point that could be shown.
_LEAST_POINTS = 2 * LEAST_RUNS

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
class CaseHistory:
    """Of one case on one machine kind, with the same settings."""

    results: tuple[PastResult, ...]
    segments: tuple[Segment, ...]
    """None where no run counts."""

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
    return tuple(lines)


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
