"""What the worker does for a setting: what it gives the Trainer and the model, and how it sees what was active."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, Trainer

from pytest_llmperf.settings.train_spec import TrainSpec


@dataclass(frozen=True)
class Training:
    """The objects of a training that is over."""

    trainer: Trainer
    model: PreTrainedModel
    optimizer: Any

    @classmethod
    def of(cls, trainer: Trainer, model: PreTrainedModel) -> Training:
        return cls(trainer, model, getattr(trainer.optimizer, "optimizer", trainer.optimizer))  # accelerate wraps it

    @property
    def wrapped(self) -> nn.Module | None:
        """The model as the Trainer calls it."""
        return self.trainer.model_wrapped

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


#: What reads a setting's evidence off a training, once all that is timed is over.
Witness = Callable[[Training], Any]


@dataclass(frozen=True, kw_only=True)
class Twin:
    """One setting, as the worker applies it."""

    name: str
    arguments: Callable[[TrainSpec, torch.device], Mapping[str, Any]] = lambda *_: {}
    """Of ``TrainingArguments``."""
    model_arguments: Callable[[TrainSpec], Mapping[str, Any]] = lambda _: {}
    """Of the model."""
    on_class: Callable[[TrainSpec, type, PreTrainedConfig], None] = lambda *_: None
    """Whether the model's class has it, before anything is built.

    Raises:
        RefusedError: it has not.
    """
    before_model: Callable[[TrainSpec], None] = lambda _: None
    on_model: Callable[[TrainSpec, PreTrainedModel], None] = lambda *_: None
    """To the model as it was built."""
    on_weights: Callable[[TrainSpec, PreTrainedModel], None] = lambda *_: None
    """To the model once nothing else changes its weights."""
    on_trainer: Callable[[TrainSpec, torch.device], None] = lambda *_: None
    """What making a Trainer undoes."""
    watch: Callable[[TrainSpec, PreTrainedModel], Witness] | None = None
    """Begin to watch, before a Trainer is made; ``None``: nothing is seen of it."""


def seen(witness: Witness) -> Callable[[TrainSpec, PreTrainedModel], Witness]:
    """A watch that needs no beginning."""
    return lambda _spec, _model: witness
