"""Figures of stored baselines, as commands show them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from itertools import groupby
from typing import Any

from pytest_llmperf.cli.baseline_folder import Stored
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import METRICS
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support import formats

RATE, MEMORY = "tokens_per_second_per_gpu", "peak_reserved_bytes"


def by_machine(stored: Iterable[Stored]) -> list[tuple[str, list[Stored]]]:
    """Machine kinds and their baselines, both sorted."""
    ordered = sorted(stored, key=lambda one: (one.baseline.machine, one.baseline.id))
    return [(machine, list(group)) for machine, group in groupby(ordered, key=lambda one: one.baseline.machine)]


def figure(baseline: Baseline, metric: str) -> float:
    """A metric of all launches of ``baseline``, as a verdict is held against them."""
    return METRICS[metric].of(baseline.launches)


def shown(metric: str, value: float | None) -> str:
    """A metric's value for people."""
    return formats.figure(metric, value, METRICS[metric].unit)


def change(value: float | None, reference: float | None) -> float | None:
    """As a fraction; ``None`` where there is nothing to compare."""
    return value / reference - 1 if value is not None and reference else None


def spec_defaults() -> dict[str, Any]:
    """TrainSpec's settings that have a default."""
    return {one.name: one.default for one in fields(TrainSpec) if one.default is not MISSING}
