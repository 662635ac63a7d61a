"""The histories of all cases: each without what the GPUs of its runs did, as far as the other cases tell of that."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.judge.history.case_history import CaseHistory, host_steps, recounted, segments
from pytest_llmperf.judge.history.change_points import LEAST_CHANGE, ChangePoint, find_levels, levels_between
from pytest_llmperf.judge.history.shared_effects import SharedEffects, groups
from pytest_llmperf.judge.history.timeline import Timeline
from pytest_llmperf.judge.noise import Noise
from pytest_llmperf.records.past_result import PastResult

#: Of a case, the newest ones: its covariance has the square of them, and a second's work. Nights of five years.
MOST_RUNS = 2000

# Of its standard errors: what a case and its GPUs' other cases did in opposite directions is no change of the case.
_SEEN = 3.0


_Case = tuple[str, str, str]


@dataclass(frozen=True)
class Scattering:
    """How launches of a machine kind scatter."""

    noise: Noise
    are_gpus: bool = True
    """Whether what cases of a run share is their hardware's; a busy CPU moves each of them at its own time."""


def histories(
    results: Sequence[PastResult], scattering: Mapping[str, Scattering], asked: Container[tuple[str, str]] | None = None
) -> list[CaseHistory]:
    """Of each case, by its newest ``MOST_RUNS``; other settings and other machine kinds are other cases.

    ``results`` are in the order of time. ``scattering``: by machine kind; ``asked``: machine kinds and digests of the
    cases that are wanted, else all. What the others have taken tells of the GPUs all the same.
    """
    cases: dict[_Case, list[PastResult]] = {}
    for result in results:
        cases.setdefault((result.machine, result.digest, result.project), []).append(result)
    timelines = {case: Timeline.of(several[-MOST_RUNS:]) for case, several in cases.items()}
    found: dict[_Case, CaseHistory] = {}
    for machine, known in scattering.items():
        own = {case: one for case, one in timelines.items() if case[0] == machine}
        for group in groups(own.values()):
            told = _Told.of(group, known)
            mine = [case for case in map(_case, group) if asked is None or case[:2] in asked]
            found |= {case: told.history(own[case]) for case in mine}
    return [found[case] for case in cases if case in found]


def _case(timeline: Timeline) -> _Case:
    first = timeline.results[0]
    return first.machine, first.digest, first.project


@dataclass(frozen=True)
class _Told:
    """What the cases of a group tell of one another."""

    known: Scattering
    shared: SharedEffects
    changes: Sequence[tuple[str, ChangePoint]]
    """Of all of them, each with the time at which a run began it."""

    @classmethod
    def of(cls, group: Sequence[Timeline], known: Scattering) -> _Told:
        shared = SharedEffects.of(group if known.are_gpus else ())
        common = Timeline((), shared.points)
        if not common.points:
            return cls(known, shared, ())
        levels = find_levels(common.logs, common.scatter(known.noise), common.runs)
        return cls(known, shared, [(shared.began[change.index], change) for change in levels.changes])

    def history(self, timeline: Timeline) -> CaseHistory:
        if not timeline.points:
            return CaseHistory(timeline.results, ())
        if not self.known.are_gpus:  # times are noise there, and exact counts tell alone
            counted = [ChangePoint(index, 0.0, 0.0, 0.0) for index in recounted(timeline)]
            levels = levels_between(timeline.logs, timeline.scatter(self.known.noise), counted)
            return CaseHistory(timeline.results, segments(timeline, levels, {}, are_times=False))
        alone = self.shared.without(timeline)
        own = find_levels(alone.logs, alone.scatter(self.known.noise), alone.runs)
        changes = {change.index: change for change in own.changes}
        shared: dict[int, float] = {}
        for index, common in self._common(alone):
            near = next((each for each in (index, index - 1, index + 1) if each in changes), index)
            total = _sum(near, changes.get(near), common)
            shared[near] = common.log
            changes[near] = total
        kept = [each for each in changes.values() if each.index not in shared or _is_seen(each)]
        kept.sort(key=lambda change: change.index)
        noise = self.known.noise
        levels = levels_between(timeline.logs, timeline.scatter(noise), kept)
        return CaseHistory(timeline.results, segments(timeline, levels, shared), host_steps(timeline, noise, kept))

    def _common(self, timeline: Timeline) -> list[tuple[int, ChangePoint]]:
        """The changes of all cases, by where they are in ``timeline``, from which they have been taken off."""
        began = [timeline.results[point.run].began for point in timeline.points]
        places = [(bisect_left(began, at), change) for at, change in self.changes]
        told = [point.left < 1 for point in timeline.points]
        return [(i, change) for i, change in places if 0 < i < len(told) and told[i - 1] and told[i]]


def _sum(index: int, own: ChangePoint | None, common: ChangePoint) -> ChangePoint:
    if own is None:
        return ChangePoint(index, common.log, common.error, common.probability)
    error = math.hypot(own.error, common.error)
    return ChangePoint(index, own.log + common.log, error, min(own.probability, common.probability))


def _is_seen(change: ChangePoint) -> bool:
    return abs(change.log) >= max(LEAST_CHANGE, _SEEN * change.error)
