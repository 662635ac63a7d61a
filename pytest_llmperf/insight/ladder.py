"""A ladder of optimisations, or of GPU counts: what each rung brings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.records.result import Reference
from pytest_llmperf.spec.train_spec import TrainSpec


@dataclass(frozen=True)
class Rung:
    """One row of a published table."""

    number: str
    """The table it is of."""
    spec: TrainSpec
    reference: Reference | None = None
    """What was published of it."""

    @property
    def published_rate(self) -> float | None:
        """Tokens/s per GPU; ``None`` where none was published."""
        return self.reference.tokens_per_second_per_gpu if self.reference else None

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the publication says so: a trial that shows the limit, and no step of the ladder."""
        return self.reference is not None and self.reference.tokens_per_second_per_gpu is None


@dataclass(frozen=True)
class Gain:
    """What a rung brings, as ratios of rates; ``None`` where one of the two is not known."""

    over_previous: float | None
    """Over the step before it."""
    over_first: float | None
    """Over the first step."""


def gains(rungs: Sequence[Rung], rates: Sequence[float | None]) -> list[Gain]:
    """The gain of each rung by its rate; a trial that ran out of memory is nothing to climb from."""
    found = []
    previous, first = None, rates[0] if rates else None
    for index, (rung, rate) in enumerate(zip(rungs, rates, strict=True)):
        found.append(Gain(_ratio(rate, previous) if index else None, _ratio(rate, first)))
        if not rung.ran_out_of_memory:
            previous = rate
    return found


def step_before(rungs: Sequence[Rung], index: int) -> Rung | None:
    """The step that the rung at ``index`` is held against."""
    return next((rung for rung in reversed(rungs[:index]) if not rung.ran_out_of_memory), None)


def largest_jump(rungs: Sequence[Rung], found: Sequence[Gain]) -> int | None:
    """Which step gained most over the one before it; ``None`` where no gain is known."""
    jumps = {
        index: gain.over_previous
        for index, (rung, gain) in enumerate(zip(rungs, found, strict=True))
        if gain.over_previous is not None and not rung.ran_out_of_memory
    }
    return max(jumps, key=lambda index: jumps[index], default=None)


def _ratio(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate and other else None


@dataclass(frozen=True)
class Width:
    """One training on so many GPUs, each with the same work, against one GPU."""

    gpus: int
    rate: float | None
    """Tokens/s per GPU; ``None`` where it is not known."""
    rate_of_one: float | None
    """The same on one GPU."""
    memory_bytes: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Of all GPUs."""
        return None if self.rate is None else self.rate * self.gpus

    @property
    def speed_up(self) -> float | None:
        return None if self.efficiency is None else self.efficiency * self.gpus

    @property
    def efficiency(self) -> float | None:
        """Speed-up over the number of GPUs, a fraction; at a constant price of a GPU-hour the cost efficiency too."""
        return _ratio(self.rate, self.rate_of_one)
