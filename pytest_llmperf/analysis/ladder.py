"""A ladder of optimisations, or of GPU counts: what each rung brings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pytest_llmperf.records.result import Reference
from pytest_llmperf.settings.train_spec import TrainSpec, precision_fields
from pytest_llmperf.support.formats import GIB


@dataclass(frozen=True)
class Rung:
    """One row of a published table."""

    number: str
    """The table it is of."""
    spec: TrainSpec
    reference: Reference | None = None

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
    """What a rung brings over the step before it, and over the first: ratios of rates; ``None``: one is not known."""

    over_previous: float | None
    over_first: float | None


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
        return None if self.rate is None else self.rate * self.gpus

    @property
    def speed_up(self) -> float | None:
        return None if self.efficiency is None else self.efficiency * self.gpus

    @property
    def efficiency(self) -> float | None:
        """Speed-up over the number of GPUs, a fraction; at a constant price of a GPU-hour the cost efficiency too."""
        return _ratio(self.rate, self.rate_of_one)


# Chapter 15 as data: the rungs of tables 15.1 to 15.9 and the widths of 15.10 to 15.12, for both models, as
# published.

CHAPTER = "chapter 15, MareNostrum 5 (H100 64 GB)"
LAB = "lab 10, MareNostrum 5 (H100 64 GB)"
#: Steps of each published run.
STEPS = 450

#: What makes the published figures and ours differ besides the machine.
NOTES = (
    "published: steps x batch x length / train_runtime, the first step included; ours: the median steady step",
    "published fp32 may use TF32, which that container allows; ours is true fp32",
)


def _spec(model: str, precision: str, attention: str, micro_batch_size: int, **more: Any) -> TrainSpec:
    fields = precision_fields(precision)
    return TrainSpec(model=model, **fields, attention=attention, micro_batch_size=micro_batch_size, **more)


_llama, _opt = partial(_spec, "llama-3.2-1b"), partial(_spec, "opt-1.3b")


def _published(source: str, tokens_per_second_per_gpu: float, peak_reserved_gib: float) -> Reference:
    return Reference(
        source=source,
        tokens_per_second_per_gpu=tokens_per_second_per_gpu,
        peak_reserved_bytes=peak_reserved_gib * GIB,
    )


_OUT_OF_MEMORY = Reference(source=CHAPTER, tokens_per_second_per_gpu=None)

LLAMA = (
    Rung("15.1", _llama("fp32", "eager", 6), _published(CHAPTER, 10485, 61.89)),
    Rung("15.2", _llama("fp32", "eager", 7), _OUT_OF_MEMORY),
    Rung("15.3", _llama("bf16-mixed", "eager", 5), _published(CHAPTER, 11489, 58.27)),
    Rung("15.4", _llama("bf16", "eager", 5), _published(CHAPTER, 13520, 47.66)),
    Rung("15.5", _llama("bf16", "eager", 7), _published(CHAPTER, 14315, 61.32)),
    Rung("15.5", _llama("bf16", "eager", 8), _OUT_OF_MEMORY),
    Rung("15.6", _llama("bf16", "sdpa", 7), _published(CHAPTER, 24446, 39.27)),
    Rung("15.7", _llama("bf16", "sdpa", 14), _published(CHAPTER, 27669, 60.89)),
    Rung("15.8", _llama("bf16", "sdpa", 14, liger=True), _published(CHAPTER, 36479, 32.46)),
    Rung("15.9", _llama("bf16", "sdpa", 37, liger=True), _published(CHAPTER, 48081, 62.33)),
)

# The slides publish OPT's first rung and its best one; the steps between are the chapter's, with batches of ours.
OPT = (
    Rung("15.1", _opt("fp32", "eager", 4), _published(LAB, 7601.89, 57.6)),
    Rung("15.2", _opt("fp32", "eager", 5)),
    Rung("15.3", _opt("bf16-mixed", "eager", 4)),
    Rung("15.4", _opt("bf16", "eager", 4)),
    Rung("15.5", _opt("bf16", "eager", 6)),
    Rung("15.6", _opt("bf16", "sdpa", 6)),
    Rung("15.7", _opt("bf16", "sdpa", 16), _published(LAB, 33544.73, 59.11)),
    Rung("15.8", _opt("bf16", "sdpa", 16, liger=True)),
    Rung("15.9", _opt("bf16", "sdpa", 32, liger=True)),
)

LADDERS = (LLAMA, OPT)
#: GPUs of tables 15.10 to 15.12.
WIDTHS = (1, 2, 4, 8, 16, 32)


def _widths(spec: TrainSpec, published: dict[int, Reference]) -> tuple[Rung, ...]:
    return tuple(Rung("15.10", replace(spec, gpus=gpus), published.get(gpus)) for gpus in WIDTHS)


# The chapter's tables are Llama's; of OPT the slides of lab 10 have one GPU and 32.
LLAMA_WIDTHS = _widths(
    _llama("bf16", "sdpa", 37, liger=True),
    {
        1: _published(CHAPTER, 48229, 62.34),
        2: _published(CHAPTER, 46188, 62.21),
        4: _published(CHAPTER, 43432, 61.97),
        8: _published(CHAPTER, 42297, 62.13),
        16: _published(CHAPTER, 41869, 61.99),
        32: _published(CHAPTER, 41424, 61.99),
    },
)
OPT_WIDTHS = _widths(
    _opt("bf16", "sdpa", 16),
    {
        1: _published(LAB, 33544.73, 59.11),
        32: Reference(source=LAB, tokens_per_second_per_gpu=29026),
    },
)

SCALINGS = (LLAMA_WIDTHS, OPT_WIDTHS)
