"""What configurations cost as far as that can be counted: arithmetic and bytes of their steps, choice by choice."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pytest_llmperf.analysis.formulas import least_seconds, peak_bandwidth, peak_flops
from pytest_llmperf.launch.prediction import PredictionProcess, step_request, why_none
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.settings.setting import Choice
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec

_SIZE = "micro_batch_size"
# Others train on this host meanwhile.
_NICENESS = 10


class StepPredictions:
    """One search's predictions, by one process that needs no GPU."""

    def __init__(self) -> None:
        self._process = PredictionProcess(_NICENESS)
        self._memory: dict[TrainSpec, int] = {}
        self._work: dict[TrainSpec, int] = {}

    def ask(self, specs: Iterable[TrainSpec], *, work: bool = False) -> None:
        """Let their memory, or for ``work`` their operators, be predicted beside what this process does."""
        numbers = self._work if work else self._memory
        for spec in specs:
            if spec in numbers or why_none(spec) is not None:
                continue
            with suppress(SpecError):  # fp8 keeps 16-bit values, or fewer, and may be all that makes it a spec
                request = step_request(replace(spec, fp8="no"), operators=work)
                numbers[spec] = self._process.send(request | ({"traffic": True} if work else {}))

    def peak_bytes(self, spec: TrainSpec) -> int | None:
        """For one rank; ``None`` where it cannot be predicted."""
        self.ask([spec])
        answer = self._process.receive(self._memory[spec]) if spec in self._memory else {}
        return sum(answer["parts"].values()) if "parts" in answer else None

    def work(self, spec: TrainSpec) -> Mapping[str, Any] | None:
        """``operators``, ``flops`` and ``traffic`` by operator; ``None`` as above."""
        self.ask([spec], work=True)
        answer = self._process.receive(self._work[spec]) if spec in self._work else {}
        return answer if "traffic" in answer else None

    def close(self) -> None:
        """End what predicts."""
        self._process.close()


# Of an axis of many micro-batches so many are counted; between two of them the logarithm is a straight line.
_SIZES = 4


def counted_prior(
    space: Space, specs: Sequence[TrainSpec], predictions: StepPredictions, gpu: str
) -> list[float] | None:
    """Return of each of ``specs``, the first of which is where the search begins, the logarithm of its seconds for a
    token, up to a constant; ``None`` where nothing can be counted.

    Each choice is counted by itself, over the first: what two bring together is for the trials to tell.
    """
    base = specs[0]
    variants = {}
    for axis in space.axes:
        choices: Sequence[Choice] = axis.choices
        if _SIZE in axis.fields and len(choices) > _SIZES:
            choices = [choices[round(place * (len(choices) - 1) / (_SIZES - 1) / 2)] for place in range(_SIZES)]
        variants[axis.name] = _each(choices, base)
    predictions.ask([base, *(spec for one in variants.values() for spec in one.values())], work=True)
    own = _log(base, predictions, gpu)
    if own is None:
        return None
    effects: dict[str, dict[str, float]] = {}
    for name, one in variants.items():
        logs = {choice: _log(spec, predictions, gpu) for choice, spec in one.items()}
        effects[name] = {choice: log - own for choice, log in logs.items() if log is not None}
    # Doublings of the micro-batch, and what each brings.
    points = {}
    for axis in (axis for axis in space.axes if _SIZE in axis.fields):
        sizes = {choice.name: dict(choice.fields)[_SIZE] for choice in axis.choices}
        points[axis.name] = sorted((math.log2(sizes[name]), effect) for name, effect in effects[axis.name].items())
    return [
        sum(
            _between(points[name], spec.micro_batch_size) if name in points else effects[name].get(choice, 0.0)
            for name, choice in space.choices_of(spec).items()
        )
        for spec in specs
    ]


def _each(choices: Iterable[Choice], spec: TrainSpec) -> dict[str, TrainSpec]:
    """``spec`` with each of ``choices`` that can be, by its name."""
    found = {}
    for choice in choices:
        with suppress(SpecError):
            found[choice.name] = replace(spec, **dict(choice.fields))
    return found


def _log(spec: TrainSpec, predictions: StepPredictions, gpu: str) -> float | None:
    work = predictions.work(spec)
    if work is None:
        return None
    seconds = least_seconds(
        work["operators"],
        work["flops"],
        work["traffic"],
        peak=peak_flops(gpu, spec.compute_precision),
        bandwidth=peak_bandwidth(gpu),
    )
    tokens = spec.micro_batch_size * spec.gradient_accumulation_steps * spec.sequence_length
    return math.log(seconds / tokens) if seconds > 0 else None


def _between(points: Sequence[tuple[float, float]], size: int) -> float:
    """On the line through ``points``; beyond the last as it."""
    if not points:
        return 0.0
    place = math.log2(size)
    below = [point for point in points if point[0] <= place]
    above = [point for point in points if point[0] >= place]
    (x0, y0), (x1, y1) = (below or above[:1])[-1], (above or below[-1:])[0]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (place - x0) / (x1 - x0)


# Of a card, what its driver and libraries leave.
_LEFT = 0.985
# fp8 takes tokens in sixteens, and so may be refused for one sequence.
_FP8_SIZE = 16


@dataclass
class _Bounds:
    """Where only the micro-batch differs: it fits up to one size, and not from another on."""

    fits: float = 0
    fails: float = math.inf


class MemoryForecast:
    """Which configurations fit on cards with so many bytes; 0: no limit is known, and everything fits."""

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
        known = self._known(spec)
        peak = self.peak_bytes(spec) if known is None and self._limit else None
        if peak is None:
            return known is not False
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
        """Note what a trial of ``spec`` said of its memory."""
        bounds = self._bounds_of(spec)
        if trial.is_too_large:
            bounds.fails = min(bounds.fails, spec.micro_batch_size)
        elif trial.is_measured and spec in self._peaks:
            self._ratios.append(trial.peak_reserved_bytes / self._peaks[spec])

    def least(self) -> tuple[TrainSpec, int] | None:
        """Return what takes the least memory of all that was looked at, and its predicted bytes."""
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


def by_settings(specs: Iterable[TrainSpec]) -> TrainSpec:
    """The one of ``specs`` whose settings ask for the least, where nothing can be predicted.

    The fewest tokens at once, each rank with its part of the model, activations recomputed, a loss that never holds its
    logits, and no compiler.
    """

    def asks_for(spec: TrainSpec) -> tuple[int, ...]:
        recomputes = spec.gradient_checkpointing * (1 + (spec.checkpointing_policy == "full"))
        tokens, is_whole = spec.micro_batch_size * spec.sequence_length, spec.parallelism == "ddp"
        return (tokens, is_whole, -recomputes, -spec.liger, spec.torch_compile)

    return min(specs, key=asks_for)


def least_memory(
    space: Space,
    specs: Sequence[TrainSpec],
    forecast: MemoryForecast,
    able: Callable[[TrainSpec], bool],
    until: float,
) -> tuple[TrainSpec, int] | None:
    """What takes the least of ``space``, of which ``specs`` are known to be, and how many bytes are predicted of it.

    To predict all would take minutes. Each axis is asked for the choice that takes the least beside the others' own, as
    long as that lowers the peak and there is time. ``None``: nothing can be predicted.
    """
    spec = by_settings(specs)
    peak = forecast.peak_bytes(spec)
    if peak is None:
        return None
    is_new = True
    while is_new:
        is_new = False
        for axis in space.axes:
            if _SIZE in axis.fields or time.monotonic() >= until:  # of more sequences none takes less
                continue
            others = [other for other in _each(axis.choices, spec).values() if other != spec and able(other)]
            forecast.ask_peaks(others)
            peaks = [(forecast.peak_bytes(other), other) for other in others]
            known = [(found, other) for found, other in peaks if found is not None]
            found, other = min(known, key=lambda one: one[0], default=(peak, spec))
            if found < peak:
                spec, peak, is_new = other, found, True
    return spec, peak
