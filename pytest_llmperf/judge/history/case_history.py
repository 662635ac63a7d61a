"""CaseHistory: the levels of one case over its runs, and what was different where it went from one to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.judge.history.change_points import LEAST_RUNS, Levels, find_levels
from pytest_llmperf.judge.history.timeline import Timeline
from pytest_llmperf.judge.noise import Noise
from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.records.past_result import PastResult

# With fewer there is no change point that could be shown.
_LEAST_POINTS = 2 * LEAST_RUNS


@dataclass(frozen=True)
class Segment:
    """Runs between two change points."""

    results: tuple[PastResult, ...]
    """Those that count."""
    step_seconds: float
    low: float
    high: float
    """Between which the mean of such runs is, nineteen times in twenty, on whatever hosts."""
    rate_change: float | None
    """Of the rate since the segment before, as a fraction; ``None`` of the first one."""
    rate_change_interval: tuple[float, float] | None
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

    @classmethod
    def of(cls, results: Sequence[PastResult], noise: Noise) -> CaseHistory:
        """``results`` in the order of time."""
        timeline = Timeline.of(results)
        if not timeline.points:
            return cls(tuple(results), ())
        levels = find_levels(timeline.logs, timeline.scatter(noise), timeline.runs)
        return cls(tuple(results), _segments(timeline, levels))

    @property
    def id(self) -> str:
        return self.results[-1].id

    @property
    def machine(self) -> str:
        return self.results[-1].machine

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


def histories(results: Sequence[PastResult], noises: dict[str, Noise]) -> list[CaseHistory]:
    """Of each case by itself: other settings and other machine kinds are other cases. ``noises``: by machine kind."""
    cases: dict[tuple[str, str], list[PastResult]] = {}
    for result in results:
        cases.setdefault((result.machine, result.digest), []).append(result)
    return [CaseHistory.of(several, noises[machine]) for (machine, _), several in cases.items()]


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
    for name in dict.fromkeys([*before.counts, *after.counts]):
        then, now = before.counts.get(name), after.counts.get(name)
        if then is not None and now is not None and then != now:
            lines.append(f"{name}: {then:g} -> {now:g}")
    hosts, sites = ([sorted({getattr(one, what) for one in each.launches}) for each in (before, after)] for what in ("host", "site"))
    if hosts[0] != hosts[1]:
        lines.append(f"host: {' | '.join(hosts[0]) or 'unknown'} -> {' | '.join(hosts[1]) or 'unknown'}")
    elif sites[0] != sites[1]:
        lines.append("GPU: another of the same host")
    return tuple(lines)


def _segments(timeline: Timeline, levels: Levels) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for number, level in enumerate(levels.levels):
        runs = dict.fromkeys(timeline.runs[level.start : level.end])
        results = tuple(timeline.results[run] for run in runs)
        reach = quantile(0.975, level.df) * level.error
        change = levels.changes[number - 1] if number else None
        spread = quantile(0.975, level.df) * change.error if change else 0.0
        found.append(
            Segment(
                results=results,
                step_seconds=math.exp(level.log),
                low=math.exp(level.log - reach),
                high=math.exp(level.log + reach),
                rate_change=math.expm1(-change.log) if change else None,
                rate_change_interval=(math.expm1(-change.log - spread), math.expm1(-change.log + spread))
                if change
                else None,
                different=differences(found[-1].results[-1], results[0]) if found else (),
            )
        )
    return tuple(found)
