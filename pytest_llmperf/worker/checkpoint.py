"""Checkpoint: the Trainer's own save, once and after all that is timed, into the launch's folder, and removed again.

When it begins and ends the heartbeat tells, as of each phase of a launch; its size is evidence that it was made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_llmperf.support.formats import memory
from pytest_llmperf.worker.refusal import RefusedError


class Checkpoint:
    """Of one rank."""

    def __init__(self, spec_id: str, folder: Path) -> None:
        """``folder`` is the Trainer's, for which there may be nothing yet."""
        self._spec_id, self._folder = spec_id, folder
        self.num_bytes = 0

    @property
    def evidence(self) -> dict[str, int]:
        return {"checkpoint_bytes": self.num_bytes}

    def check_room(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Whether there is room for what is known of it: before the first step its weights alone.

        Raises:
            RefusedError: there is not.
        """
        needed = sum(_bytes_of(model.parameters()))
        needed += sum(_bytes_of(_tensors(optimizer.state.values()))) if optimizer is not None else 0
        free = free_bytes(self._folder.parent)
        if needed > free:
            raise RefusedError(
                f"{self._spec_id}: save_checkpoint writes at least {memory(needed)}, and {self._folder.parent} has "
                f"{memory(free)} left; make room there, or leave it out"
            )

    def end(self) -> None:
        """It was written, on this rank: wait for the others."""
        if dist.is_initialized():
            dist.barrier()
        self.num_bytes = sum(path.stat().st_size for path in self._folder.rglob("checkpoint-*/**/*") if path.is_file())

    def remove(self) -> None:
        """On each node, once all have counted."""
        if dist.is_initialized():
            dist.barrier()
        if os.environ["LOCAL_RANK"] == "0":
            shutil.rmtree(self._folder, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    """What may still be written there."""
    return shutil.disk_usage(folder).free


def _tensors(states: Iterable[Any]) -> Iterator[torch.Tensor]:
    for state in states:
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Of one that is sharded the whole."""
    return (tensor.numel() * tensor.element_size() for tensor in tensors)
