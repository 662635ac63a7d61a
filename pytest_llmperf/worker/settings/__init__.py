"""The twin of each setting by the same file name: it applies the setting to a Trainer's training and witnesses it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

if TYPE_CHECKING:  # what these see of modules is seen of a user's own script, too, which may have no transformers
    from transformers import PreTrainedModel, Trainer


@dataclass(frozen=True)
class Training:
    trainer: Trainer
    model: PreTrainedModel

    @property
    def optimizer(self) -> Any:
        found = self.trainer.optimizer
        while hasattr(found, "optimizer"):  # accelerate wraps it, and DeepSpeed
            found = found.optimizer
        return found

    @property
    def wrapped(self) -> nn.Module | None:
        return self.trainer.model_wrapped

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


#: Of a spec and its model: what a training shows of a setting. A twin has those of its settings, by their names.
Witness: TypeAlias = Callable[[Any, Any], Callable[[Training], Any]]


def of_twins(name: str) -> Iterator[Any]:
    """What each module here has by this name: ``WITNESSES``; ``arguments``, of a spec and a device, for the Trainer; or
    ``PREPARE``, which changes a spec's model once it is built."""
    twins = (import_module(f"{__name__}.{twin.name}") for twin in pkgutil.iter_modules(__path__))
    return (getattr(twin, name) for twin in twins if hasattr(twin, name))
