"""Exchange between ranks: how long each waits for it, in each step, with nothing of its own left to compute.

Data-parallel ranks meet twice in a step of the Trainer: before the first forward pass, where they add up how many
tokens the step has, and where the backward pass ends. DDP reduces gradients, bucket by bucket, while that pass still
computes others (Li et al. 2020, "PyTorch Distributed", section 3.2). What is left when the last one is there is what
training loses: the part of the all-reduce that did not hide, and the lateness of slower ranks. Two instants a meeting
tell it; nothing is synchronised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

import torch
from torch.utils.hooks import RemovableHandle

from pytest_llmperf.worker.measuring.instruments import Clock, Instant


class Exchange(Generic[Instant]):
    """Watches one rank's meetings with the others: when it arrived, and when it could go on."""

    def __init__(self, clock: Clock[Instant]) -> None:
        self._clock = clock
        self._hooks: list[RemovableHandle] = []
        self._last: torch.Tensor | None = None
        self._passes = 0
        self._arrived: Instant | None = None
        self._meetings: list[tuple[Instant, Instant]] = []
        self._steps: list[list[tuple[Instant, Instant]]] = []
        self._is_known = True

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Before the first backward pass, which shows whose gradient is the last."""
        trained = (parameter for parameter in parameters if parameter.requires_grad)
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._has_gradient) for parameter in trained]

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        self._last = parameter
        self.arrive()

    def arrive(self) -> None:
        """From now on this rank may have to wait; what comes before the first backward pass is of no step."""
        if self._hooks:
            self._arrived = self._clock.instant()

    def leave(self) -> None:
        """It goes on, if it had arrived."""
        if self._arrived is not None:
            self._meetings.append((self._arrived, self._clock.instant()))
        self._arrived = None

    def end_pass(self) -> None:
        """After each backward pass."""
        self._is_known = self._is_known and self._arrived is not None
        self.leave()
        if self._passes == 0:
            self._watch_the_last()
        self._passes += 1

    def _watch_the_last(self) -> None:
        """One hook from now on: a hundred and more in each step would be felt."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [] if self._last is None else [self._last.register_post_accumulate_grad_hook(self._has_gradient)]

    def end_step(self) -> None:
        self._steps.append(self._meetings)
        self._meetings = []

    def seconds(self) -> tuple[float, ...]:
        """What each step waited, in seconds, once all work has ended; empty where a pass did not tell."""
        if not self._is_known:
            return ()
        return tuple(sum(self._clock.between(*meeting) for meeting in meetings) for meetings in self._steps)
