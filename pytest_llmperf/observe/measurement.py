"""Measurement: one rank's timed steps, and what is read off where they end; what comes later is no part of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch.utils.hooks import RemovableHandle

from pytest_llmperf.observe.instruments import Clock, Instant, Memory
from pytest_llmperf.records.launch import Place, RankRecord
from pytest_llmperf.records.learning import UNWANTED as UNINSPECTED
from pytest_llmperf.records.learning import RankLearning, uninspected
from pytest_llmperf.records.trace import UNWANTED, Trace


@dataclass(frozen=True)
class Later:
    """What one rank sees after all that is timed."""

    attention_kernel: str = "unknown"
    """The operators that attention calls."""
    trace: Trace = field(default_factory=lambda: Trace(none=UNWANTED))
    learning: RankLearning = field(default_factory=lambda: uninspected(UNINSPECTED))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank saw of a finished run; the launch's record is made of it, whatever has trained."""

    record: RankRecord
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...] = ()
    """Of the first steps, before clipping."""
    train_seconds: float
    """From the first step's begin to the end of the last one's work, as the host saw it."""
    parameters: int
    evidence: Mapping[str, Any]
    """But for what is seen ``later``."""
    later: Later = field(default_factory=Later)


class Exchange(Generic[Instant]):
    """One rank's meetings with the others: how long it waits in each step with nothing of its own left to compute."""

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
        if self._passes == 0:  # one hook from now on: a hundred and more in each step would be felt
            for hook in self._hooks:
                hook.remove()
            last = self._last
            self._hooks = [] if last is None else [last.register_post_accumulate_grad_hook(self._has_gradient)]
        self._passes += 1

    def end_step(self) -> None:
        self._steps.append(self._meetings)
        self._meetings = []

    def seconds(self) -> tuple[float, ...]:
        """What each step waited, in seconds, once all work has ended; empty where a pass did not tell."""
        if not self._is_known:
            return ()
        return tuple(sum(self._clock.between(*meeting) for meeting in meetings) for meetings in self._steps)


# Of which gradients' norms are kept: the first is of weights that are known to the last bit.
_FIRST_STEPS = 4


class Measurement:
    """Filled while the rank trains; ``trained`` reads it once it is over."""

    def __init__(self, clock: Clock[Any], memory: Memory, exchange: Exchange[Any] | None) -> None:
        self.step_seconds: tuple[float, ...] = ()
        self.is_begun = self.is_over = False
        """Of passes forward and backward; of steps that are timed."""
        self._clock, self._memory, self._exchange = clock, memory, exchange
        self._losses: list[torch.Tensor] = []  # of each micro-batch, on its device
        self._norms: list[torch.Tensor] = []
        self._num_tokens = 0
        self._real_tokens: list[int] = []
        self._start = self._seconds = 0.0
        self._held: list[int | None] = []
        self._waiting: tuple[float, ...] = ()
        self._peaks = 0, 0

    def begin(self) -> None:
        """With the first step."""
        self._start = time.perf_counter()
        self._clock.mark()

    def end_pass(self, loss: torch.Tensor, tokens: int, real_tokens: int | None) -> None:
        """Of a micro-batch; ``real_tokens`` are those that are no padding, ``None`` where it has none."""
        if not self.is_over:
            self.is_begun = True
            self._losses.append(loss)
            self._num_tokens += tokens
            if real_tokens is not None:
                self._real_tokens.append(real_tokens)

    def end_gradients(self, norm: Any) -> None:
        """Of a step: they are clipped, and had this norm before."""
        if len(self._norms) < _FIRST_STEPS and isinstance(norm, torch.Tensor):
            self._norms.append(norm.detach())

    def end_step(self) -> None:
        """All its work has been issued."""
        self._clock.mark()
        if self._exchange:
            self._exchange.end_step()
        self._held.append(self._memory.allocated())

    def end(self) -> None:
        """That was the last step: wait for the device, and read what later steps would change."""
        self.step_seconds = self._clock.seconds()
        self._seconds = time.perf_counter() - self._start
        self._waiting = self._exchange.seconds() if self._exchange else ()
        self._peaks = self._memory.peaks()
        self.is_over = True

    def trained(self, passes_per_step: int, place: Place, rank: int, rates: Mapping[str, Any], **facts: Any) -> Trained:
        """What was seen, beside what a measurement does not know: ``rates`` of its device, and ``Trained``'s others.

        Raises:
            RuntimeError: steps had different numbers of tokens.
        """
        steps = len(self.step_seconds)
        if self._num_tokens % steps:
            raise RuntimeError(f"{self._num_tokens} tokens in {steps} steps: the batches were not all of one size")
        # Losses are kept by this measurement, and are no growth of the training's.
        own = len(self._losses) // len(self._held) * self._memory.loss_bytes
        # Losses of micro-batches are scaled so that they add up to their step's.
        losses = torch.stack(self._losses).float().cpu().view(-1, passes_per_step).sum(dim=1)
        real = self._real_tokens
        # Ranks of sharded weights add theirs up here. None where the loss's scale made one infinite.
        whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in self._norms]
        norms = tuple(torch.stack(whole).float().tolist()) if whole else ()
        record = RankRecord(
            rank=rank,
            **vars(place),
            tokens_per_step=self._num_tokens // steps,
            real_tokens=tuple(sum(real[at : at + passes_per_step]) for at in range(0, len(real), passes_per_step)),
            step_seconds=self.step_seconds,
            waiting_seconds=self._waiting,
            allocated_bytes=tuple(each - own * step for step, each in enumerate(self._held) if each is not None),
            peak_reserved_bytes=self._peaks[0],
            peak_allocated_bytes=self._peaks[1],
            **rates,
        )
        return Trained(
            record=record,
            losses=tuple(losses.tolist()),
            gradient_norms=norms if all(map(math.isfinite, norms)) else (),
            train_seconds=self._seconds,
            **facts,
        )
