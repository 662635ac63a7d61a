"""CapacityBaseline: the largest micro-batch of one spec on one machine kind, its history, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pytest_llmperf.judge.baseline_file import Accepted, BaselineError, Document, side_by_side
from pytest_llmperf.judge.integrity import same_anchor
from pytest_llmperf.records.metrics import MEMORY, METRICS
from pytest_llmperf.records.result import Check, Verdict
from pytest_llmperf.support.formats import in_sentence

METRIC = "max_micro_batch_size"


@dataclass(frozen=True, kw_only=True)
class CapacityBaseline(Document):
    """What the largest micro-batch of a spec is held against."""

    anchor: Accepted
    history: tuple[Accepted, ...]
    """Every acceptance, newest last; the anchor is the first."""

    @property
    def size(self) -> int:
        """Sequences per rank and forward pass."""
        return int(self.history[-1].metrics[METRIC])

    noun: ClassVar[str] = "a baseline of a largest micro-batch"

    def check(self) -> None:
        if not self.history:
            raise ValueError("it holds no history")
        same_anchor(self.anchor, self.history)
        if not self.history[-1].metrics.get(METRIC, 0.0) >= 1:
            raise ValueError(f"{METRIC} is {self.history[-1].metrics.get(METRIC)}, expected 1 or more")


def describe_capacity(old: CapacityBaseline | None, new: CapacityBaseline) -> list[str]:
    """Old, new and anchor side by side, for people."""

    def figures(entry: Accepted) -> str:
        memory = in_sentence(entry.metrics[MEMORY], "bytes") if MEMORY in entry.metrics else "-"
        return f"{entry.metrics[METRIC]:>13.0f} sequences  {memory:>10}"

    before = old.history[-1] if old else None
    return [f"recorded {new.id}", *side_by_side(before, new.history[-1], new.anchor, figures)]


def judge_capacity(size: int, baseline: CapacityBaseline | None) -> Check:
    """The check of the largest micro-batch: memory is nearly exact, so one that is gone is a loss."""
    check = METRICS[METRIC].check(size, tolerance=0.0, verdict="new")
    if baseline is None:
        return check
    stored = baseline.size
    verdict: Verdict = "regressed" if size < stored else "improved" if size > stored else "pass"
    return replace(check, baseline=stored, limit=stored, change=size / stored - 1, verdict=verdict)


def accept_capacity(old: CapacityBaseline | None, new: CapacityBaseline) -> CapacityBaseline:
    """``new``, of one acceptance, after those of ``old``; BaselineError: it is smaller, and nobody said why."""
    if old is None:
        return new
    if new.size < old.size and not new.anchor.reason:
        raise BaselineError(f'{new.id}: worse ({METRIC} {old.size} -> {new.size}); accept it with --perf-reason "why"')
    return replace(new, anchor=old.anchor, history=(*old.history, *new.history))
