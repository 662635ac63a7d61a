"""Measurement: one rank's timed steps, and what is read off where they end; what comes later is no part of it."""

from __future__ import annotations

import time
from typing import Any

import torch

from pytest_llmperf.worker.measuring.gradient_exchange import Exchange
from pytest_llmperf.worker.measuring.instruments import Clock, Memory

# Of which gradients' norms are kept: the first is of weights that are known to the last bit.
_FIRST_STEPS = 4


class Measurement:
    """Filled while the rank trains; its figures are there once it is over."""

    step_seconds: tuple[float, ...]
    waiting_seconds: tuple[float, ...]
    seconds: float
    """From the first step's begin to the end of the last one's work, as the host saw it."""
    allocated_bytes: tuple[int, ...]
    peak_reserved_bytes: int
    peak_allocated_bytes: int

    def __init__(self, clock: Clock[Any], memory: Memory, exchange: Exchange[Any] | None) -> None:
        self.exchange = exchange
        self.losses: list[torch.Tensor] = []
        """Of each micro-batch, on its device."""
        self.gradient_norms: list[torch.Tensor] = []
        """Of the first steps, on their device."""
        self.num_tokens = 0
        self.real_tokens: list[int] = []
        """Of each micro-batch those that are no padding; none are told of one that has no padding."""
        self.is_over = False
        self._clock, self._memory = clock, memory
        self._start = 0.0
        self._held: list[int | None] = []

    def begin(self) -> None:
        """With the first step."""
        self._start = time.perf_counter()
        self._clock.mark()

    def end_pass(self, loss: torch.Tensor, tokens: int, real_tokens: int | None = None) -> None:
        """Of a micro-batch."""
        if not self.is_over:
            self.losses.append(loss)
            self.num_tokens += tokens
            if real_tokens is not None:
                self.real_tokens.append(real_tokens)

    def end_gradients(self, norm: Any) -> None:
        """Of a step: they are clipped, and had this norm before."""
        if len(self.gradient_norms) < _FIRST_STEPS and isinstance(norm, torch.Tensor):
            self.gradient_norms.append(norm.detach())

    def end_step(self) -> None:
        """All its work has been issued."""
        self._clock.mark()
        if self.exchange:
            self.exchange.end_step()
        self._held.append(self._memory.allocated())

    def end(self) -> None:
        """That was the last step: wait for the device, and read everything."""
        self.step_seconds = self._clock.seconds()
        self.seconds = time.perf_counter() - self._start
        # Losses are kept by this measurement, and are no growth of the training's.
        own = len(self.losses) // len(self._held) * self._memory.loss_bytes
        self.allocated_bytes = tuple(each - own * step for step, each in enumerate(self._held) if each is not None)
        self.waiting_seconds = self.exchange.seconds() if self.exchange else ()
        self.peak_reserved_bytes, self.peak_allocated_bytes = (
            self._memory.peak_reserved(),
            self._memory.peak_allocated(),
        )
        self.is_over = True
