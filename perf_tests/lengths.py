"""One sequence of 8,192, 32,768 and 131,072 tokens as data: by which choices a training of it fits.

Llama 3.2 1B and 3.1 8B, whose published configurations end at 131,072 tokens, with random weights. Of each length what
is predicted to fit 80 or 140 GB by the fewest choices, and beside it what is predicted not to: that has to run out of
memory. What an optimizer of 8 bits takes is not predicted. Of 131,072 tokens three steps are timed, which take 15 and
50 s each of an H100. On the CPU the tiny model, with sequences a 128th as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from perf_tests.fine_tuning import WAYS, FineTuning
from perf_tests.ladder import on_cpu
from pytest_llmperf import TrainSpec

#: The last is as long as these models go.
LENGTHS = SHORT, MIDDLE, LONG = 8192, 32768, 131_072
_ON_CPU = 128
# As many steps as their time allows: five that count are known by themselves, of two the rate is.
_STEPS: dict[int, dict[str, Any]] = {
    SHORT: {"steps": 16, "min_steps": 10},
    MIDDLE: {"steps": 8, "min_steps": 7, "warmup_steps": 2},
    LONG: {"steps": 3, "min_steps": 3, "warmup_steps": 1},
}

_FULL, _LORA, _NF4 = WAYS
_MIXED: dict[str, Any] = {"model_precision": "fp32", "mixed_precision": "bf16"}
# What each layer computes is made again from what it was given, which may wait on the host.
_AGAIN: dict[str, Any] = {"gradient_checkpointing": True}
_AWAY: dict[str, Any] = {**_AGAIN, "offloading": "activations"}
_PLAIN: dict[str, Any] = {"liger": False}


def _spec(model: str, length: int, **choices: Any) -> TrainSpec:
    base = TrainSpec(
        model=model,
        sequence_length=length,
        mixed_precision="no",
        liger=True,
        optimizer="adamw_torch_fused",
        **_STEPS[length],
    )
    return replace(base, **choices)


def _shared(parallelism: str, gpus: int) -> dict[str, Any]:
    return {**_AGAIN, "parallelism": parallelism, "gpus": gpus}


def _small() -> Iterator[FineTuning]:
    """Below so many GiB the last ones do not fit; all figures are a hundredth below the predicted peaks."""
    model = "llama-3.2-1b"
    yield FineTuning(_spec(model, SHORT))
    yield FineTuning(_spec(model, MIDDLE))
    yield FineTuning(_spec(model, MIDDLE, **_PLAIN), 106.0)
    yield FineTuning(_spec(model, MIDDLE, **_MIXED))
    yield FineTuning(_spec(model, LONG, **_AGAIN))
    yield FineTuning(_spec(model, LONG, **_MIXED, **_AGAIN))
    yield FineTuning(_spec(model, LONG), 156.0)


def _large() -> Iterator[FineTuning]:
    model = "llama-3.1-8b"
    yield FineTuning(_spec(model, SHORT, **_LORA))
    yield FineTuning(_spec(model, MIDDLE, **_LORA, **_AGAIN))
    yield FineTuning(_spec(model, MIDDLE, **_LORA), 151.0)
    yield FineTuning(_spec(model, LONG, **_LORA, **_AGAIN))
    for length in LENGTHS:
        yield FineTuning(_spec(model, length, **_NF4, **_AGAIN))
    yield FineTuning(_spec(model, SHORT, **_FULL, **_AGAIN), 59.0)
    yield FineTuning(_spec(model, SHORT, **_FULL), 79.5)
    yield FineTuning(_spec(model, MIDDLE, **_FULL, **_AGAIN), 63.0)
    yield FineTuning(_spec(model, MIDDLE, **_AGAIN, **_PLAIN), 99.0)
    yield FineTuning(_spec(model, LONG, **_FULL, **_AGAIN), 97.0)
    yield FineTuning(_spec(model, LONG, **_FULL, **_AWAY), 79.5)
    yield FineTuning(_spec(model, LONG, **_AWAY, optimizer="adamw_bnb_8bit"))
    yield FineTuning(_spec(model, LONG, **_shared("context", 2)))
    for length, least in ((SHORT, 118.0), (MIDDLE, 123.0)):
        yield FineTuning(_spec(model, length, **_MIXED, **_AGAIN), least)
        yield FineTuning(_spec(model, length, **_MIXED, **_shared("fsdp", 2)))
    yield FineTuning(_spec(model, LONG, **_MIXED, **_AGAIN), 181.0)
    yield FineTuning(_spec(model, LONG, **_MIXED, **_shared("context", 4)))


LONG_CONTEXT = [*_small(), *_large()]


def _tiny(spec: TrainSpec) -> TrainSpec:
    """On one rank, without what a GPU alone has."""
    plain = replace(spec, parallelism="ddp", gpus=1, offloading="no", liger=False, optimizer="adamw_torch")
    return replace(on_cpu(plain), sequence_length=spec.sequence_length // _ON_CPU)


LONG_CONTEXT_ON_CPU = [FineTuning(spec) for spec in dict.fromkeys(_tiny(each.spec) for each in LONG_CONTEXT)]
