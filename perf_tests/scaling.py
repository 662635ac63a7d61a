"""More GPUs as cases: weak scaling at every width of the chapter's tables, strong scaling with one batch for all.

Weak: each GPU has the work of the ladder's last step, so the narrowest case is that rung itself and shares its
measurement. Strong: one optimizer step takes the same sequences at every width. Each list goes from narrow to wide,
since a width is held over the narrowest that ran before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from perf_tests.ladder import LADDER, on_cpu
from pytest_llmperf import Reference, TrainSpec
from pytest_llmperf.analysis import ladder

#: What shards weights, and the fewest GPUs it shards over. Under mixed precision it would keep fp32 weights: pure bf16.
_SHARDING = {"fsdp": 2, "fsdp_hybrid": 4}

#: Sequences of an optimizer step where all widths share them.
GLOBAL_BATCH = 64
_STRONG_WIDTHS = (1, 2, 4, 8)
# The largest share that fits a step of one GPU beside the ladder's 37, and divides the batch.
_MOST_AT_ONCE = 32

# On eight H200 of a host 96 % was measured, and 86 % is published of 32 GPUs: below this something is broken.
_FLOOR = 0.8

# What two cores train at once.
_CPU_WIDTHS, _CPU_BATCH, _CPU_MOST_AT_ONCE = (1, 2), 8, 4


@dataclass(frozen=True)
class Width:
    """One training on so many GPUs."""

    spec: TrainSpec
    scaled_from: TrainSpec | None = None
    """What its efficiency is over, where that is another amount of work for each GPU."""
    published: Reference | None = None
    """What the chapter's table 15.10 says."""
    at_least: float | None = None
    """Floor of its efficiency."""
    inactive: tuple[str, ...] = ()
    """Settings that are asked for and change nothing for this model."""


def _weak(best: TrainSpec, inactive: tuple[str, ...], widths: Sequence[int]) -> Iterator[Width]:
    references = {rung.spec: rung.reference for rungs in ladder.SCALINGS for rung in rungs}
    for gpus in widths:
        spec = replace(best, gpus=gpus)
        yield Width(spec, None, references.get(spec), _FLOOR, inactive)


def _sharded(best: TrainSpec, inactive: tuple[str, ...], widths: Sequence[int]) -> Iterator[Width]:
    pure = replace(best, mixed_precision="no")
    for parallelism, fewest in _SHARDING.items():
        for gpus in widths:
            if gpus >= fewest:
                yield Width(replace(pure, gpus=gpus, parallelism=parallelism), inactive=inactive)


def _strong(best: TrainSpec, batch: int, most_at_once: int, widths: Sequence[int]) -> Iterator[Width]:
    one = _share(best, batch, most_at_once, 1)
    for gpus in widths:
        yield Width(_share(best, batch, most_at_once, gpus), scaled_from=one)


def _share(best: TrainSpec, batch: int, most_at_once: int, gpus: int) -> TrainSpec:
    """``gpus`` share the batch: in one forward pass as far as it fits, else in several."""
    sequences = batch // gpus
    at_once = min(sequences, most_at_once)
    return replace(best, gpus=gpus, micro_batch_size=at_once, gradient_accumulation_steps=sequences // at_once)


def _on_cpu(spec: TrainSpec) -> TrainSpec:
    """The tiny model of its family; Liger's kernels need a GPU."""
    return replace(on_cpu(spec), liger=False, micro_batch_size=_CPU_MOST_AT_ONCE)


def _zero(best: TrainSpec, widths: Sequence[int]) -> Iterator[Width]:
    """DeepSpeed computes with copies in bf16 of weights in fp32; the first is the one GPU that these are held over."""
    mixed = replace(best, model_precision="fp32")
    yield Width(mixed)
    for parallelism in ("zero2", "zero3"):
        yield from (Width(replace(mixed, gpus=gpus, parallelism=parallelism)) for gpus in widths)
    # A rank's passes take a part of each sequence: as many passes as ranks are the tokens of one pass without.
    for gpus in widths:
        shared = replace(mixed, gpus=gpus, parallelism="sequence", gradient_accumulation_steps=gpus)
        yield Width(shared, scaled_from=mixed)


_BEST = [rung for rung in LADDER if rung.number == "15.9"]
_LLAMA = next(rung.spec for rung in _BEST if rung.spec.model == "llama-3.2-1b")

WEAK = [width for rung in _BEST for width in _weak(rung.spec, rung.inactive, ladder.WIDTHS)]
#: Shards of the same work; the first is the one GPU that Llama's are held over.
SHARDED = [
    Width(replace(_LLAMA, mixed_precision="no")),
    *(width for rung in _BEST for width in _sharded(rung.spec, rung.inactive, ladder.WIDTHS)),
    # Of the widths that divide its eight heads of keys and values; transformers has no such plan of OPT.
    *(
        Width(replace(_LLAMA, mixed_precision="no", gpus=gpus, parallelism=parallelism))
        for parallelism in ("tensor", "context")
        for gpus in (2, 4, 8)
    ),
    *_zero(_LLAMA, (2, 4, 8)),
]
STRONG = list(_strong(_LLAMA, GLOBAL_BATCH, _MOST_AT_ONCE, _STRONG_WIDTHS))

WEAK_ON_CPU = [replace(width, at_least=None) for rung in _BEST for width in _weak(_on_cpu(rung.spec), (), _CPU_WIDTHS)]
SHARDED_ON_CPU = list(_zero(_on_cpu(_LLAMA), (2,)))
STRONG_ON_CPU = list(_strong(_on_cpu(_LLAMA), _CPU_BATCH, _CPU_MOST_AT_ONCE, _CPU_WIDTHS))
