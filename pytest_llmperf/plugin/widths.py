"""Widths: what this run has judged, for tests that ask for the same and for wider cases of the same training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_llmperf.insight.widths import is_narrower
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.efficiency import Narrow, Terms
from pytest_llmperf.plugin.marks import Marks
from pytest_llmperf.result import CaseResult
from pytest_llmperf.spec import TrainSpec


@dataclass(frozen=True)
class Asked:
    """Everything that decides what ``perf.check`` does with a spec, but which test asks."""

    spec: TrainSpec
    marks: Marks
    scaled_from: TrainSpec | None

    @classmethod
    def of(cls, spec: TrainSpec, marks: Marks, scaled_from: TrainSpec | None) -> Asked:
        """What only names or illustrates a case is left out."""
        efficiency = marks.efficiency if spec.gpus > 1 else Terms()
        return cls(spec, replace(marks, rung="", reference=None, efficiency=efficiency), scaled_from)


@dataclass(frozen=True)
class Measured:
    """One case that this run has judged."""

    asked: Asked
    result: CaseResult
    baseline: Baseline | None
    """What it was held against."""
    held_against: str
    refused: str


class Widths:
    """The cases that this process has judged, in their order."""

    def __init__(self) -> None:
        self._measured: list[Measured] = []

    def add(self, measured: Measured) -> None:
        """Keep it, for tests that ask for the same and for wider cases; what cannot be trusted serves neither."""
        if measured.result.verdict != "invalid":
            self._measured.append(measured)

    def same(self, asked: Asked) -> Measured | None:
        """The very same case, asked for by an earlier test."""
        return next((one for one in self._measured if one.asked == asked), None)

    def narrow(self, wide: TrainSpec, scaled_from: TrainSpec | None) -> Narrow | None:
        """The narrowest of the series of ``wide``, or ``scaled_from``, as this run measured it."""

        def serves(spec: TrainSpec) -> bool:
            return spec.digest == scaled_from.digest if scaled_from else is_narrower(spec, wide)

        found = [one for one in self._measured if one.result.launches and serves(one.asked.spec)]
        best = min(found, key=lambda one: one.asked.spec.gpus, default=None)
        if best is None:
            return None
        return Narrow(
            gpus=best.asked.spec.gpus, launches=best.result.launches, baseline=best.baseline, in_this_run=True
        )
