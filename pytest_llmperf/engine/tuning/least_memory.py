"""What of a space takes the least memory: found choice by choice where the beginning of a search does not fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pytest_llmperf.engine.tuning.memory_forecast import MemoryForecast
from pytest_llmperf.spec.space.axis import Axis
from pytest_llmperf.spec.space.space import Space
from pytest_llmperf.spec.train_spec import SpecError, TrainSpec

_SIZE = "micro_batch_size"


def by_settings(specs: Iterable[TrainSpec]) -> TrainSpec:
    """Of ``specs`` the one whose settings ask for the least, where nothing can be predicted.

    The fewest tokens at once, each rank with its part of the model, activations recomputed, a loss that never holds its
    logits, and no compiler.
    """

    def asks_for(spec: TrainSpec) -> tuple[int, ...]:
        recomputes = spec.gradient_checkpointing + (spec.checkpointing_policy == "full")
        tokens = spec.micro_batch_size * spec.sequence_length
        is_whole = spec.parallelism == "ddp"
        return (tokens, is_whole, -recomputes * spec.gradient_checkpointing, -spec.liger, spec.torch_compile)

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
            others = [other for other in _others(axis, spec) if able(other)]
            forecast.ask_peaks(others)
            peaks = [(forecast.peak_bytes(other), other) for other in others]
            known = [(found, other) for found, other in peaks if found is not None]
            found, other = min(known, key=lambda one: one[0], default=(peak, spec))
            if found < peak:
                spec, peak, is_new = other, found, True
    return spec, peak


def _others(axis: Axis, spec: TrainSpec) -> list[TrainSpec]:
    """``spec`` with each other choice of ``axis`` that can be."""
    found = []
    for choice in axis.choices:
        try:
            other = replace(spec, **dict(choice.fields))
        except SpecError:
            continue
        if other != spec:
            found.append(other)
    return found
