"""MemoryForecast: which configurations fit, by predicted memory, and by what ran out of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pytest_llmperf.engine.tuning.step_predictions import StepPredictions
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.spec.train_spec import TrainSpec

# Of a card, what its driver and libraries leave.
_LEFT = 0.985
# fp8 takes tokens in sixteens, and so may be refused for one sequence.
_FP8_SIZE = 16


@dataclass
class _Bounds:
    """Of what differs by the micro-batch alone: it fits up to one size, and not from another on."""

    fits: float = 0
    fails: float = math.inf


class MemoryForecast:
    """Of one search, on cards with so many bytes; 0: no limit is known, and everything fits."""

    def __init__(self, limit_bytes: int, predictions: StepPredictions) -> None:
        self._limit, self._predictions = limit_bytes, predictions
        self._bounds: dict[TrainSpec, _Bounds] = {}
        self._peaks: dict[TrainSpec, int] = {}
        self._ratios: list[float] = []

    def ask(self, specs: Iterable[TrainSpec]) -> None:
        """Let be predicted, beside what this process does, what will be asked for."""
        if self._limit:
            self._predictions.ask(spec for spec in specs if self._known(spec) is None)

    def ask_peaks(self, specs: Iterable[TrainSpec]) -> None:
        """The same for ``peak_bytes``, whatever other sizes tell."""
        if self._limit:
            self._predictions.ask(spec for spec in specs if spec not in self._peaks)

    def fits(self, spec: TrainSpec) -> bool:
        """Whether a launch of ``spec`` is worth its seconds."""
        if not self._limit:
            return self._known(spec) is not False
        known = self._known(spec)
        if known is not None:
            return known
        peak = self.peak_bytes(spec)
        if peak is None:
            return True
        bounds, size = self._bounds_of(spec), spec.micro_batch_size
        if self.is_enough_for(peak):
            bounds.fits = max(bounds.fits, size)
            return True
        bounds.fails = min(bounds.fails, size)
        return False

    def peak_bytes(self, spec: TrainSpec) -> int | None:
        """Predicted of one rank; ``None`` where it cannot be, or no limit makes it worth knowing."""
        if self._limit and spec not in self._peaks:
            peak = self._predictions.peak_bytes(spec)
            if peak is None:
                return None
            self._peaks[spec] = peak
        return self._peaks.get(spec)

    def is_enough_for(self, peak_bytes: int) -> bool:
        """Whether what there is holds a rank that is predicted to take so many bytes."""
        return peak_bytes <= self._limit * _LEFT

    def learn(self, spec: TrainSpec, trial: Trial) -> None:
        """What a trial of ``spec`` said of its memory."""
        bounds = self._bounds_of(spec)
        if trial.is_too_large:
            bounds.fails = min(bounds.fails, spec.micro_batch_size)
        elif trial.is_measured and spec in self._peaks:
            self._ratios.append(trial.peak_reserved_bytes / self._peaks[spec])

    def least(self) -> tuple[TrainSpec, int] | None:
        """Of what was looked at, what takes the least memory, and how much is predicted of it."""
        return min(self._peaks.items(), key=lambda one: one[1], default=None)

    @property
    def errors(self) -> tuple[float, float] | None:
        """The least and the largest of what trials had reserved over what was predicted that tensors take, minus 1."""
        return (min(self._ratios) - 1, max(self._ratios) - 1) if self._ratios else None

    def _known(self, spec: TrainSpec) -> bool | None:
        """Whether it fits, as far as other sizes tell: of more sequences none takes less."""
        bounds = self._bounds_of(spec)
        if spec.micro_batch_size >= bounds.fails:
            return False
        return True if spec.micro_batch_size <= bounds.fits else None

    def _bounds_of(self, spec: TrainSpec) -> _Bounds:
        size = 1 if spec.fp8 == "no" else _FP8_SIZE
        shape = replace(
            spec, micro_batch_size=size, gradient_accumulation_steps=min(2, spec.gradient_accumulation_steps)
        )
        return self._bounds.setdefault(shape, _Bounds())
