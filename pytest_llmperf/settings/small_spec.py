"""A spec made small, and its plainest form: what parity trains in their place. Pure."""

from __future__ import annotations

from dataclasses import replace

from pytest_llmperf.settings.batch import PASSES, SEQUENCES
from pytest_llmperf.settings.registry import SETTINGS
from pytest_llmperf.settings.train_spec import TrainSpec


def small(spec: TrainSpec) -> TrainSpec:
    """``spec`` with a step of ``SEQUENCES`` short sequences, on as few ranks as show that they share it."""
    return replace(spec, **{name: value for setting in SETTINGS for name, value in setting.small(spec).items()})


def plainest(spec: TrainSpec) -> TrainSpec:
    """The same small training with nothing that makes it fast: what is left decides what is learnt."""
    plain = {name: value for setting in SETTINGS for name, value in setting.plain(spec).items()}
    return replace(small(spec), **plain)


def in_pieces(plain: TrainSpec) -> TrainSpec:
    """The plain form with each step in several passes: another order of the same sums."""
    return replace(plain, gradient_accumulation_steps=SEQUENCES // PASSES, micro_batch_size=PASSES)


def in_fp32(spec: TrainSpec) -> TrainSpec:
    """``spec`` in fp32, where rounding hides least; attention by a kernel that has fp32 where its own has none."""
    return replace(spec, **{name: value for setting in SETTINGS for name, value in setting.in_fp32(spec).items()})
