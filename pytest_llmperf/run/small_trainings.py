"""The small trainings of a run: what one of a case did serves every other case that asks for the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_llmperf.records.parity_order import ParityOrder
from pytest_llmperf.records.training_errors import TrainingErrors


@dataclass(frozen=True)
class MadeTrainings:
    """Of one launch: what was seen of each, and the folder where the plain form's true gradients lie too."""

    folder: str
    errors: tuple[TrainingErrors, ...]


@dataclass
class SmallTrainings:
    """By what decides them."""

    truths: dict[tuple[str, ParityOrder], MadeTrainings] = field(default_factory=dict)
    errors: dict[tuple[str, str], tuple[TrainingErrors, ...]] = field(default_factory=dict)
