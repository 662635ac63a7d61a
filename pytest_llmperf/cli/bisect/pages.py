"""What a bisection found, as lines for people and as a document for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_llmperf.cli.screen import Screen, facts, plain, table
from pytest_llmperf.engine.bisecting.bisection import Bisection, Change, Step
from pytest_llmperf.judge.bisecting.yardstick import Yardstick
from pytest_llmperf.records.result import Spent
from pytest_llmperf.report.table import Column
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support import formats

# Exact changes that a page shows; the document has all.
_MOST_EXACT = 8


def page(spec: TrainSpec, found: Bisection, spent: Spent, further: str, screen: Screen) -> Iterator[str]:
    """Each candidate that was launched, then the first bad one."""
    num = found.num_candidates
    yield f"{spec.id}: {num} candidate{'s' * (num != 1)} after {found.good.told}"
    if found.steps:
        yield ""
        yield from table(_columns(found.steps), screen)
        yield ""
    for step in found.steps:
        if step.reason:
            yield plain(f"{step.candidate.shown}: {step.reason}")
    if found.yardstick is not None:
        yield from _conclusion(found, further)
    launches = f"{spent.launches} launch{'es' * (spent.launches != 1)}"
    yield from (f"note: {plain(note)}" for note in found.notes)
    gpus = f"; {spent.gpu_seconds / 60:.1f} GPU-minutes" if spent.gpu_seconds else ""
    yield f"cost: {launches}, {formats.elapsed(sum(spent.phases.values()))}{gpus}"


def _columns(steps: tuple[Step, ...]) -> list[Column]:
    return [
        Column("candidate", [plain(step.candidate.shown) for step in steps], right=False),
        Column("side", [step.side or "not decided" for step in steps], right=False),
        Column("pairs", [f"{step.pairs}{' (kept)' if step.was_kept else ''}" for step in steps]),
        Column("step time", [_shown(step.change) for step in steps]),
        Column("exact", [plain("; ".join(step.exact[:1])) or formats.ABSENT for step in steps], right=False),
    ]


def _conclusion(found: Bisection, further: str) -> Iterator[str]:
    assert found.yardstick is not None  # noqa: S101 - asked by its caller alone
    by = _words(found.yardstick)
    if found.first_bad is None:
        yield f"the first bad one is one of these {len(found.suspects)}, told apart by {by}:"
        yield from (f"  {plain(one.told)}" for one in found.suspects)
        return
    yield f"first bad: {plain(found.first_bad.told)}"
    last = found.last_good or found.good
    yield from facts(
        {
            "last good": last.told,
            "told apart by": by,
            "step time": _shown(found.change),
            "confidence": _confidence(found),
        }
    )
    if found.diagnosis:
        yield plain(f"points to: {found.diagnosis}")
    if found.exact:
        yield "different:"
        yield from (f"  {plain(line)}" for line in found.exact[:_MOST_EXACT])
        if len(found.exact) > _MOST_EXACT:
            yield f"  and {len(found.exact) - _MOST_EXACT} more, which --json has"
    yield f"look further: {further}"


def document(
    spec: TrainSpec, found: Bisection, spent: Spent, further: str, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The same as plain values."""
    first_bad = found.first_bad
    return {
        "case": spec.id,
        "spec": spec.to_dict(),
        "machine": dict(machine),
        "good": found.good.to_dict(),
        "bad": found.bad.to_dict(),
        "candidates": found.num_candidates,
        "by": found.yardstick.by if found.yardstick else None,
        "steps": [step.to_dict() for step in found.steps],
        "suspects": [one.to_dict() for one in found.suspects],
        "first_bad": first_bad.to_dict() if first_bad else None,
        "last_good": found.last_good.to_dict() if found.last_good else None,
        "change": vars(found.change) if found.change else None,
        "confidence": found.confidence,
        "exact": list(found.exact),
        "diagnosis": found.diagnosis,
        "further": further,
        "ended": found.ended,
        "notes": list(found.notes),
        "launches": spent.launches,
        "gpu_seconds": spent.gpu_seconds,
    }


def _words(yardstick: Yardstick) -> str:
    if yardstick.by == "counts":
        good, bad = yardstick.ends
        return f"{yardstick.metric.removesuffix('_per_step')} of a step, {good:g} and {bad:g}"
    if yardstick.by == "evidence":
        return f"what is exact: {'; '.join(sorted(yardstick.lines)[:2])}"
    name = "step time" if yardstick.by == "speed" else "peak memory"
    return f"{name}, {formats.percent(math.expm1(yardstick.size))} from end to end"


def _confidence(found: Bisection) -> str:
    if found.confidence == 1:
        return "no noise is in what was compared; of several changes, one that crosses the middle"
    return f"at least {100 * found.confidence:.0f} % that the change is there, if it is one change"


def _shown(change: Change | None) -> str:
    if change is None:
        return formats.ABSENT
    log, low, high = (formats.percent(math.expm1(value)) for value in (change.log, change.low, change.high))
    return f"{log} ({low} to {high})"
