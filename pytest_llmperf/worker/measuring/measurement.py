"""Measurement: one rank's timed steps, and what is read off where they end; what comes later is no part of it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Protocol

import torch
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, Trainer

from pytest_llmperf.observe.instruments import Clock, Instant, Memory
from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.launch import Place
from pytest_llmperf.records.launch_end import DECIDED, GOES_ON, PassingRanges, looks, why_end
from pytest_llmperf.records.learning.learning import RankLearning
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.checkpoint import Checkpoint
from pytest_llmperf.worker.data.training_data import TrainingData
from pytest_llmperf.worker.evidence import Witnesses
from pytest_llmperf.worker.request import Later, Trained
from pytest_llmperf.worker.settings.attention import attention_kernel

# Stopping: ends a launch once more steps would say nothing that matters, every rank at the same step.


class StepTimes(Protocol):
    def so_far(self) -> tuple[float, ...]:
        """Times of the steps that are finished, in seconds, without waiting for others."""


class Stopping:
    """One rank's part in the decision."""

    def __init__(  # noqa: PLR0913 - the facts of one rank, and of what was asked for
        self,
        spec: TrainSpec,
        clock: StepTimes,
        rank: int,
        place: Place | None = None,
        passing: PassingRanges | None = None,
        *,
        all_steps: bool = False,
    ) -> None:
        """``place`` is this rank's; where all of them are chooses from ``passing``. ``all_steps``: it does not look."""
        self._spec, self._clock, self._rank, self._passing = spec, clock, rank, passing
        self._looks = frozenset(() if all_steps else looks(spec.min_steps, spec.steps))
        self._store = _store() if spec.gpus > 1 else None
        self._places = [] if place is None else [place]
        self._why = GOES_ON
        if self._store is not None and place is not None:
            self._store.set(f"place-{rank}", json.dumps(asdict(place)))

    @property
    def evidence(self) -> dict[str, str]:
        """What a reader of few steps should know; nothing of a launch that ended as all do."""
        return {"ended": DECIDED} if self._why == DECIDED else {}

    def now(self, step: int) -> bool:
        """Whether ``step``, which this rank has just issued, is the last one."""
        if step >= self._spec.steps:
            return True
        if step not in self._looks:
            return False
        self._why = self._look() if self._store is None else self._agreed(self._store, f"stop-{step}")
        return self._why != GOES_ON

    def _agreed(self, store: Store, key: str) -> str:
        if self._rank == 0:
            if self._passing is not None and len(self._places) < self._spec.gpus:
                # They were told before the first step, in which all ranks met.
                told = (store.get(f"place-{rank}") for rank in range(self._spec.gpus))
                self._places = [Place(**json.loads(place)) for place in told]
            store.set(key, self._look())
        return str(store.get(key).decode())

    def _look(self) -> str:
        passing = None if self._passing is None else self._passing.at(self._places)
        return why_end(self._clock.so_far(), self._spec.warmup_steps, passing)


def _store() -> Store:
    # The server is torchrun's agent, or rank 0's process group; either way it is there.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore("llmperf", store)


# Exchange between ranks: how long each waits for it, in each step, with nothing of its own left to compute.


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


# ObservedTraining: one rank's training, seen by witnesses that are there before it and told of once it is over.


@dataclass
class ObservedTraining:
    """What is watched of the training of ``spec``."""

    spec: TrainSpec
    model: PreTrainedModel
    measurement: Measurement
    stopping: Stopping
    checkpoint: Checkpoint | None
    canary: Mapping[str, float]
    calibration: Calibration | None
    measured: Callable[[Trained], None]
    """Who is told before steps are traced: what breaks or hangs in these takes nothing from it."""
    data: TrainingData
    remarks: Sequence[str] = ()
    """What is asked for and is not done, a line each."""
    _kept: Trained | None = None
    _witnesses: Witnesses = field(init=False)

    def __post_init__(self) -> None:
        self._witnesses = Witnesses(self.spec, self.model)

    def keep(self, trainer: Trainer) -> None:
        """All that is timed is over."""
        self._kept = self._seen(trainer)
        self.measured(self._kept)

    def ended(self, trainer: Trainer, trace: Trace, learning: RankLearning) -> Trained:
        """All is over, and one more sequence may be tried."""
        trained = self._kept or self._seen(trainer)
        return replace(trained, later=Later(attention_kernel(trainer, self.model), trace, learning))

    def _seen(self, trainer: Trainer) -> Trained:
        measurement = self.measurement
        return Trained(
            step_seconds=measurement.step_seconds,
            waiting_seconds=measurement.waiting_seconds,
            losses=_step_losses(measurement.losses, self.spec.gradient_accumulation_steps),
            gradient_norms=_norms(measurement.gradient_norms),
            real_tokens=_by_step(measurement.real_tokens, self.spec.gradient_accumulation_steps),
            tokens_per_step=_per_step(measurement.num_tokens, len(measurement.step_seconds)),
            allocated_bytes=measurement.allocated_bytes,
            peak_reserved_bytes=measurement.peak_reserved_bytes,
            peak_allocated_bytes=measurement.peak_allocated_bytes,
            train_seconds=measurement.seconds,
            parameters=self.model.num_parameters(),
            canary=self.canary,
            calibration=self.calibration,
            evidence={
                **self._witnesses.collect(trainer, self.model),
                **self.data.evidence(len(measurement.step_seconds) * self.spec.sequences_per_step),
                **self.stopping.evidence,
                **(self.checkpoint.evidence if self.checkpoint else {}),
                **({"remarks": list(self.remarks)} if self.remarks else {}),
            },
        )


def _step_losses(micro_losses: list[torch.Tensor], per_step: int) -> tuple[float, ...]:
    """Loss of each optimizer step; the Trainer scales micro-batch losses so that they add up to it."""
    losses = torch.stack(micro_losses).float().cpu()
    return tuple(losses.view(-1, per_step).sum(dim=1).tolist())


def _norms(norms: list[torch.Tensor]) -> tuple[float, ...]:
    """As numbers; of sharded weights ranks add theirs up here. None where the loss's scale made one infinite."""
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    found = tuple(torch.stack(whole).float().tolist()) if whole else ()
    return found if all(map(math.isfinite, found)) else ()


def _by_step(numbers: list[int], per_step: int) -> tuple[int, ...]:
    return tuple(sum(numbers[start : start + per_step]) for start in range(0, len(numbers), per_step))


def _per_step(tokens: int, steps: int) -> int:
    if tokens % steps:
        raise RuntimeError(f"{tokens} tokens in {steps} steps: the batches were not all of one size")
    return tokens // steps
