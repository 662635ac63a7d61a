"""Checks of a static step against a stored one: exact with the same versions, news with others. Pure.

Decision 30 says what follows from a figure that moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pytest_llmperf.judge.step_store import Place
from pytest_llmperf.judge.verdict import Judgement
from pytest_llmperf.records.metrics import METRICS, label
from pytest_llmperf.records.result import CaseResult, Check, Verdict, worst_of
from pytest_llmperf.records.static_step import StaticStep
from pytest_llmperf.support.formats import change_of

_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::clone", "aten::_foreach_copy_"})
_WAITS = frozenset({"aten::item", "aten::is_nonzero", "aten::nonzero"})

# What computes nothing points to nothing, and is told last.
_WORKLESS = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view alias as_strided detach empty empty_like empty_strided expand lift_fresh new_empty permute "
        "select slice squeeze t transpose unsqueeze view"
    ).split()
)

PEAK = "predicted_peak_bytes"

_MOST_NAMES = 4


@dataclass(frozen=True)
class _Figure:
    """One metric of a step."""

    of: Callable[[StaticStep], Mapping[str, int]]
    more: Verdict
    fewer: Verdict


def _among(names: frozenset[str]) -> Callable[[StaticStep], Mapping[str, int]]:
    return lambda step: {name: count for name, count in step.operators.items() if name in names}


def _others(step: StaticStep) -> Mapping[str, int]:
    return {name: count for name, count in step.operators.items() if name not in _COPIES | _WAITS}


# In the order in which they are told. Less arithmetic may be a layer that is lost: nobody calls it a gain unseen.
_FIGURES: Mapping[str, _Figure] = {
    "synchronisations_per_step": _Figure(_among(_WAITS), "regressed", "changed"),
    "copies_per_step": _Figure(_among(_COPIES), "regressed", "changed"),
    "flops_per_step": _Figure(lambda step: step.flops, "regressed", "changed"),
    PEAK: _Figure(lambda step: step.memory, "regressed", "improved"),
    "operators_per_step": _Figure(_others, "changed", "changed"),
}


def judge_step(now: StaticStep, stored: StaticStep | None) -> Judgement:
    """The verdict on ``now``, held against ``stored``."""
    if stored is None:
        checks = tuple(
            METRICS[name].check(sum(figure.of(now).values()), tolerance=0.0, verdict="new")
            for name, figure in _FIGURES.items()
        )
        return Judgement("new", "no static figures yet", checks)
    others = stored.other_versions(now)
    checks = tuple(_check(name, figure, now, stored, gates=not others) for name, figure in _FIGURES.items())
    if others:
        moved = news(now, stored)
        versions = f"other versions ({', '.join(others)})"
        if not moved:
            return Judgement("pass", f"the same step with {versions}", checks)
        return Judgement("changed", f"{versions}: {moved}", checks)
    verdict = worst_of(check.verdict for check in checks)
    reason = "the same step"
    if verdict != "pass":
        moved_most = [check for check in checks if check.verdict == verdict]
        reason = ", ".join(_sentence(check) for check in moved_most)
    return Judgement(verdict, reason, checks)


def news(now: StaticStep, stored: StaticStep) -> str:
    """What moved, in one line: ``+32 aten::_to_copy a step, memory +0.40 GiB``; empty where nothing did."""
    lines = _moved(now.operators, stored.operators, "")
    words = [f"{_some(lines)} a step"] if lines else []
    for name in ("flops_per_step", PEAK):
        figure = _FIGURES[name]
        then, there = (sum(figure.of(step).values()) for step in (stored, now))
        if then != there:
            words.append(f"{label(name)} {change_of(there - then, METRICS[name].unit)}")
    return ", ".join(words)


def come_and_gone(now: StaticStep, stored: StaticStep) -> str:
    """Operators that the step did not call before, and that it calls no more: what points to the cause."""
    mine, theirs = now.operators, stored.operators
    come = _some([f"{name} ({mine[name]} a step)" for name in _most({*mine} - {*theirs}, mine)])
    gone = _some([f"{name} ({theirs[name]} a step)" for name in _most({*theirs} - {*mine}, theirs)])
    return "; ".join(f"{word} {names}" for word, names in (("gone:", gone), ("new:", come)) if names)


def _most(names: Iterable[str], counts: Mapping[str, int]) -> list[str]:
    return sorted(names, key=lambda name: (name in _WORKLESS, -counts[name], name))


def _check(name: str, figure: _Figure, now: StaticStep, stored: StaticStep, *, gates: bool) -> Check:
    mine, theirs, unit = figure.of(now), figure.of(stored), METRICS[name].unit
    value, baseline = sum(mine.values()), sum(theirs.values())
    # Of memory the peak decides: its parts take turns in being there.
    is_same = value == baseline if unit == "bytes" else mine == theirs
    verdict: Verdict = "pass" if is_same else "changed"
    if value != baseline:
        verdict = figure.more if value > baseline else figure.fewer
    return METRICS[name].check(
        value,
        baseline=baseline,
        tolerance=0.0 if gates else None,
        limit=baseline if gates else None,
        change=value / baseline - 1 if baseline else None,
        verdict=verdict if gates else None,
        detail="" if is_same else _some(_moved(mine, theirs, unit), most=8),
    )


def _moved(now: Mapping[str, int], then: Mapping[str, int], unit: str) -> list[str]:
    """How much more or less of each name, most first."""
    apart = {name: now.get(name, 0) - then.get(name, 0) for name in {*now, *then}}
    moved = sorted((-abs(change), name, change) for name, change in apart.items() if change)
    if unit in ("", "1"):
        return [f"{change:+d} {name}" for _, name, change in moved]
    return [f"{name} {change_of(change, unit)}" for _, name, change in moved]


def _some(lines: Iterable[str], most: int = _MOST_NAMES) -> str:
    first = [*lines]
    more = f" and {len(first) - most} more" if len(first) > most else ""
    return ", ".join(first[:most]) + more


def _sentence(check: Check) -> str:
    change = check.value - (check.baseline or 0.0)
    by = f" {change_of(change, check.unit)}" if change else ""
    return f"{label(check.metric)}{by} ({check.detail})" if check.detail else f"{label(check.metric)}{by}"


# Acceptance of static figures: by the rules of other figures, only a reason replaces what moved. Pure.


_MOST_FILES = 3


class _Tree(Protocol):
    """The tree that a run is of."""

    @property
    def changed(self) -> Sequence[str]: ...


def refusal(case: str, result: CaseResult, wanted: Sequence[Place], tree: _Tree, reason: str) -> str:
    """Why the step of ``result`` is not recorded at the ``wanted`` places; empty where it may be."""
    if reason or not any(place.stored for place in wanted):
        return ""
    if result.verdict in ("regressed", "changed"):
        word = "worse" if result.verdict == "regressed" else "another step"
        return f'{case}: {word} ({result.reason}); accept it with --perf-reason "why"'
    if tree.changed:
        more = f" and {len(tree.changed) - _MOST_FILES} more" if len(tree.changed) > _MOST_FILES else ""
        return (
            f"{case}: the working tree has uncommitted changes ({', '.join(tree.changed[:_MOST_FILES])}{more}); "
            "commit them, or say why with --perf-reason"
        )
    return ""


# What other versions do to the steps of a run, in a line for each set of them: news before a GPU is paid for. Pure.


def upgrade_lines(results: Sequence[CaseResult]) -> list[str]:
    """``other versions (transformers: 5.17 -> 5.23): 60 of 74 cases take another step: copies a step +32 in 58, …``."""
    by_versions: dict[tuple[str, ...], list[CaseResult]] = {}
    for result in results:
        if result.differences:
            by_versions.setdefault(result.differences, []).append(result)
    return [f"other versions ({', '.join(versions)}): {_said(cases)}" for versions, cases in by_versions.items()]


def _said(cases: Sequence[CaseResult]) -> str:
    moved = [result for result in cases if result.verdict == "changed"]
    if not moved:
        return f"{len(cases)} case(s) take the same step; record it with --update-baselines"
    words = [_range(metric, moved) for metric in dict.fromkeys(check.metric for check in moved[0].checks)]
    what = f"{len(moved)} of {len(cases)} case(s) take another step: {', '.join(filter(None, words))}"
    return f"{what}; record it with --update-baselines --perf-reason"


def _range(metric: str, cases: Sequence[CaseResult]) -> str:
    """Of those cases where it moved, from the least to the most."""
    found = [check for result in cases if (check := result.check(metric)) is not None and check.baseline is not None]
    changes = sorted({check.value - check.baseline for check in found if check.baseline is not None} - {0.0})
    number = sum(1 for check in found if check.value != check.baseline)
    if not changes:
        return ""
    ends = dict.fromkeys(change_of(change, found[0].unit) for change in (changes[0], changes[-1]))
    return f"{label(metric)} {' to '.join(ends)} in {number}"
