"""What configurations cost as far as that can be counted: arithmetic and bytes of their steps, choice by choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_llmperf.engine.tuning.step_predictions import StepPredictions
from pytest_llmperf.insight.chip_utilisation import peak_bandwidth, peak_flops
from pytest_llmperf.insight.roofline import least_seconds
from pytest_llmperf.spec.space.axis import Axis, Choice
from pytest_llmperf.spec.space.space import Space
from pytest_llmperf.spec.train_spec import SpecError, TrainSpec

# Of an axis of many micro-batches so many are counted; between two of them the logarithm is a straight line.
_SIZES = 4


def counted_prior(
    space: Space, specs: Sequence[TrainSpec], predictions: StepPredictions, gpu: str
) -> list[float] | None:
    """Of each of ``specs``, the first of which is where the search begins, the logarithm of its seconds for a token, up
    to a constant; ``None`` where nothing can be counted.

    Each choice is counted by itself, over the first: what two bring together is for the trials to tell.
    """
    base = specs[0]
    ask_counts(space, base, predictions)
    variants = {axis.name: _variants(axis, base) for axis in space.axes}
    own = _log(base, predictions, gpu)
    if own is None:
        return None
    effects = {name: _effects(one, own, predictions, gpu) for name, one in variants.items()}
    sized = {axis.name: _by_size(axis, effects[axis.name]) for axis in space.axes if "micro_batch_size" in axis.fields}
    found = []
    for spec in specs:
        choices = space.choices_of(spec)
        found.append(
            sum(
                _between(sized[name], spec.micro_batch_size) if name in sized else effects[name].get(choice, 0.0)
                for name, choice in choices.items()
            )
        )
    return found


def ask_counts(space: Space, base: TrainSpec, predictions: StepPredictions) -> None:
    """Let be counted, beside what this process does, what ``counted_prior`` asks for where ``base`` is the first."""
    variants = (spec for axis in space.axes for spec in _variants(axis, base).values())
    predictions.ask([base, *variants], work=True)


def _variants(axis: Axis, base: TrainSpec) -> dict[str, TrainSpec]:
    """By the names of its choices, ``base`` with each that can be; of many micro-batches a few."""
    choices: Sequence[Choice] = axis.choices
    if axis.fields >= {"micro_batch_size"} and len(choices) > _SIZES:
        choices = [choices[round(place * (len(choices) - 1) / (_SIZES - 1) / 2)] for place in range(_SIZES)]
    found = {}
    for choice in choices:
        try:
            found[choice.name] = replace(base, **dict(choice.fields))
        except SpecError:
            continue
    return found


def _effects(variants: Mapping[str, TrainSpec], own: float, predictions: StepPredictions, gpu: str) -> dict[str, float]:
    logs = {name: _log(spec, predictions, gpu) for name, spec in variants.items()}
    return {name: log - own for name, log in logs.items() if log is not None}


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


def _by_size(axis: Axis, effects: Mapping[str, float]) -> list[tuple[float, float]]:
    """Doublings of the micro-batch, and what each brings."""
    sizes = {choice.name: dict(choice.fields)["micro_batch_size"] for choice in axis.choices}
    return sorted((math.log2(sizes[name]), effect) for name, effect in effects.items())


def _between(points: Sequence[tuple[float, float]], size: int) -> float:
    """On the line through ``points``; beyond the last as it."""
    if not points:
        return 0.0
    place = math.log2(size)
    below = [point for point in points if point[0] <= place]
    above = [point for point in points if point[0] >= place]
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (x0, y0), (x1, y1) = below[-1], above[0]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (place - x0) / (x1 - x0)
