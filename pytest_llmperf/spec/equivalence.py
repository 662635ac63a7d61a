"""Widths: which specs are one training on other numbers of GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_llmperf.spec.train_spec import SpecError, TrainSpec


def is_narrower(narrow: TrainSpec, wide: TrainSpec) -> bool:
    """Whether ``narrow`` is the training of ``wide``, with the same work for each GPU, on fewer of them."""
    if narrow.gpus >= wide.gpus:
        return False
    # One GPU has nothing to share: DDP's figure serves every parallelism.
    parallelism = "ddp" if narrow.gpus == 1 else wide.parallelism
    try:
        return replace(wide, gpus=narrow.gpus, parallelism=parallelism).digest == narrow.digest
    except SpecError:  # a parallelism that takes more GPUs than these
        return False


def narrower(wide: TrainSpec) -> Iterator[TrainSpec]:
    """Every spec that is narrower than ``wide``, from one GPU on."""
    for gpus in range(1, wide.gpus):
        for parallelism in dict.fromkeys([wide.parallelism, *(["ddp"] if gpus == 1 else [])]):
            try:
                yield replace(wide, gpus=gpus, parallelism=parallelism)
            except SpecError:  # a parallelism that takes more GPUs than these
                continue
