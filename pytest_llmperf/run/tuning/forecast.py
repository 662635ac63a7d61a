"""What is known of configurations before a trial: what arithmetic says, and which fit by predicted memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pytest_llmperf.judge.tuning import AUTOTUNED, COMPILED, PLAIN, Field, Trial
from pytest_llmperf.launch.prediction import PredictionProcess, step_request, why_none
from pytest_llmperf.settings.attention import is_compiled_alone
from pytest_llmperf.settings.batch import SIZE
from pytest_llmperf.settings.compilation import is_compiled, times_kernels
from pytest_llmperf.settings.setting import Axis
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec

# Others train on this host meanwhile.
_NICENESS = 10
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
    """Which configurations fit on cards with so many bytes; 0: no limit is known, and everything fits.

    One process, which needs no GPU, predicts beside what this one does.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._process = limit_bytes, PredictionProcess(_NICENESS)
        self._asked: dict[TrainSpec, int] = {}
        self._bounds: dict[TrainSpec, _Bounds] = {}
        self._peaks: dict[TrainSpec, int] = {}
        self._ratios: list[float] = []

    def close(self) -> None:
        """End what predicts."""
        self._process.close()

    def ask(self, specs: Iterable[TrainSpec]) -> None:
        """Let the peaks be predicted that will be asked for, but for those that other sizes tell."""
        self._ask(spec for spec in specs if self._known(spec) is None)

    def _ask(self, specs: Iterable[TrainSpec]) -> None:
        for spec in specs if self._limit else ():
            if spec not in self._asked and why_none(spec) is None:
                with suppress(SpecError):  # fp8 keeps 16-bit values, or fewer, and may be all that makes it a spec
                    self._asked[spec] = self._process.send(step_request(replace(spec, fp8="no")))

    def fits(self, spec: TrainSpec) -> bool:
        """Whether a launch of ``spec`` is worth its seconds."""
        known = self._known(spec)
        peak = self.peak_bytes(spec) if known is None else None
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
        self._ask([spec])
        if spec in self._asked and spec not in self._peaks:
            answer = self._process.receive(self._asked[spec])
            if "parts" in answer:
                self._peaks[spec] = sum(answer["parts"].values())
        return self._peaks.get(spec)

    def is_enough_for(self, peak_bytes: int) -> bool:
        """Whether what there is holds a rank that is predicted to take so many bytes."""
        return peak_bytes <= self._limit * _LEFT

    def learn(self, spec: TrainSpec, trial: Trial) -> None:
        """Note what a trial of ``spec`` said of its memory."""
        if trial.is_too_large:
            bounds = self._bounds_of(spec)
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

    def least_of(
        self, space: Space, specs: Sequence[TrainSpec], able: Callable[[TrainSpec], bool], until: float
    ) -> tuple[TrainSpec, int] | None:
        """What takes the least of ``space``, of which ``specs`` can be, and how many bytes are predicted of it.

        To predict all would take minutes. Each axis is asked for the choice that takes the least beside the others'
        own, as long as that lowers the peak and there is time. ``None``: nothing can be predicted.
        """
        spec = by_settings(specs)
        peak = self.peak_bytes(spec)
        is_new = peak is not None
        while peak is not None and is_new:
            is_new = False
            for axis in space.axes:
                if SIZE in axis.fields or time.monotonic() >= until:  # of more sequences none takes less
                    continue
                others = [other for other in _each(axis, spec) if other != spec and able(other)]
                self._ask(others)
                known = [(found, other) for other in others if (found := self.peak_bytes(other)) is not None]
                found, other = min(known, key=lambda one: one[0], default=(peak, spec))
                if found < peak:
                    spec, peak, is_new = other, found, True
        return None if peak is None else (spec, peak)


def _each(axis: Axis, spec: TrainSpec) -> Iterator[TrainSpec]:
    """``spec`` with each choice of ``axis`` that can be."""
    for choice in axis.choices:
        with suppress(SpecError):
            yield replace(spec, **dict(choice.fields))


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


# What sparing memory costs at least, as a logarithm: a part or all of the forward pass made again, and scores that are
# written and read, which a CPU does as fast.
_SELECTIVE, _FULL, _EAGER = 0.08, 0.25, 0.3


def compiles(spec: TrainSpec) -> int:
    """How much a launch of it does; flex attention has a compiler of its own."""
    if times_kernels(spec):
        return AUTOTUNED
    return COMPILED if is_compiled(spec) or is_compiled_alone(spec) else PLAIN


def field_of(space: Space, specs: Sequence[TrainSpec], *, spares_memory: bool = True, on_cpu: bool = False) -> Field:
    """The ``specs`` of ``space`` as they are searched; ``spares_memory``: nothing else is worth recomputing."""

    def waste(spec: TrainSpec) -> float:
        recomputed = _FULL if spec.checkpointing_policy == "full" else _SELECTIVE
        scores = _EAGER * (spec.attention == "eager" and not on_cpu)
        return spares_memory * (recomputed * spec.gradient_checkpointing + scores)

    numbers = {spec: number for number, spec in enumerate(specs)}
    recipes = space.recipes() if spares_memory and not on_cpu else ()
    beginnings = [[numbers[spec] for spec in one if spec in numbers] for one in recipes]
    return Field(
        choices=[space.choices_of(spec) for spec in specs],
        size_axis=next((axis.name for axis in space.axes if SIZE in axis.fields), ""),
        sizes=[spec.micro_batch_size for spec in specs],
        tokens=[spec.sequences_per_step * spec.sequence_length for spec in specs],
        compiles=[compiles(spec) for spec in specs],
        wastes=[waste(spec) for spec in specs],
        beginnings=[one for one in beginnings if one],
    )
