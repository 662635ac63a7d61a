"""ObservedTraining: one rank's training, by plain calls where its steps, batches and passes begin and end.

Whoever drives it, a trainer's callbacks or hooks from outside, waits for nothing by any of these calls while steps are
timed. After those come steps that are traced, or looked at in another way.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Literal, Protocol

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from pytest_llmperf.observe.device import is_gpu
from pytest_llmperf.observe.heartbeat import Heartbeat
from pytest_llmperf.observe.instruments import Clock
from pytest_llmperf.observe.measurement import Exchange, Measurement
from pytest_llmperf.observe.tracer import Fetches
from pytest_llmperf.records.launch import Place
from pytest_llmperf.records.launch_end import DECIDED, GOES_ON, PassingRanges, looks, why_end


class Untimed(Protocol):
    """Steps that come after the timed ones."""

    def begin(self) -> None:
        """With the next step."""

    def end_step(self) -> bool:
        """Whether that was the last one."""


class ObservedTraining:
    """Of one rank."""

    def __init__(  # noqa: PLR0913 - each watches one thing
        self,
        measurement: Measurement,
        heartbeat: Heartbeat,
        ending: Ending,
        fetches: Fetches,
        *,
        exchange: Exchange[Any] | None = None,
        burner: Burner | None = None,
        later: Sequence[tuple[str, Untimed]] = (),
        measured: Callable[[], None] = lambda: None,
    ) -> None:
        """``later``: phases and what is done in them, in their order; before the first of them all is ``measured``."""
        self._measurement, self._heartbeat, self._ending = measurement, heartbeat, ending
        self._fetches, self._exchange, self._burner = fetches, exchange, burner
        self._coming, self._measured = [*later], measured
        self._running: Untimed | None = None

    def begin(self) -> None:
        """With the first step."""
        self._heartbeat.enter("training")  # before what is timed
        self._measurement.begin()

    def batches_asked(self) -> None:
        """A step's."""
        self._fetches.begin()

    def ranks_meet(self) -> None:
        """Before the first pass of a step, whose batches are there: from now on this rank may wait for others."""
        self._fetches.end()
        if self._exchange:
            self._exchange.arrive()

    def pass_began(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Forward and backward, of a micro-batch."""
        self._fetches.end()
        if self._exchange:
            if not self._measurement.is_begun:
                self._exchange.watch(parameters)
            self._exchange.leave()

    def pass_ended(self, loss: torch.Tensor, tokens: int, real_tokens: int | None = None) -> None:
        """``loss`` stays on its device; ``real_tokens`` are those that are no padding, where there may be some."""
        if self._exchange:
            self._exchange.end_pass()
        self._measurement.end_pass(loss, tokens, real_tokens)

    def gradients_clipped(self, norm: Any) -> None:
        """Before the update; they had this norm before they were."""
        self._measurement.end_gradients(norm)

    def step_ended(self, step: int) -> Literal["goes on", "measured", "over"]:
        """``step``, from 1: all its work has been issued.

        "measured": it was the last timed one. Whoever drives may do what nobody times, and then calls ``go_on``.
        "over": no step comes any more.
        """
        if self._burner is not None:
            self._burner.step(step)
        if self._running:
            return "over" if self._running.end_step() and not self.go_on() else "goes on"
        self._measurement.end_step()
        self._heartbeat.step = step
        if not self._ending.now(step):
            return "goes on"
        self._measurement.end()
        return "measured"

    def go_on(self) -> bool:
        """With what comes next and is not timed; whether anything does."""
        if self._coming and self._running is None:
            self._heartbeat.enter("gathering")
            self._measured()
        phase, self._running = self._coming.pop(0) if self._coming else ("finishing", None)
        self._heartbeat.enter(phase)
        if self._running:
            self._running.begin()
        return self._running is not None


# Ending: once more steps would say nothing that matters, every rank at the same step.


class StepTimes(Protocol):
    def so_far(self) -> tuple[float, ...]:
        """Times of the steps that are finished, in seconds, without waiting for others."""


class Plan(Protocol):
    """How many steps a training takes, and on how many GPUs; a ``TrainSpec`` is one."""

    @property
    def steps(self) -> int: ...

    @property
    def min_steps(self) -> int: ...

    @property
    def warmup_steps(self) -> int: ...

    @property
    def gpus(self) -> int: ...


class Ending:
    """One rank's part in the decision."""

    def __init__(  # noqa: PLR0913 - the facts of one rank, and of what was asked for
        self,
        plan: Plan,
        clock: StepTimes,
        rank: int,
        place: Place | None = None,
        passing: PassingRanges | None = None,
        *,
        all_steps: bool = False,
    ) -> None:
        """``place`` is this rank's; where all of them are chooses from ``passing``. ``all_steps``: it does not look."""
        self._plan, self._clock, self._rank, self._passing = plan, clock, rank, passing
        self._looks = frozenset(() if all_steps else looks(plan.min_steps, plan.steps))
        self._store: Store | None = None
        if plan.gpus > 1:  # the server is torchrun's agent, or rank 0's process group; either way it is there
            server = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            self._store = PrefixStore("llmperf", server)
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
        if step >= self._plan.steps:
            return True
        if step not in self._looks:
            return False
        self._why = self._look() if self._store is None else self._agreed(self._store, f"stop-{step}")
        return self._why != GOES_ON

    def _agreed(self, store: Store, key: str) -> str:
        if self._rank == 0:
            if self._passing is not None and len(self._places) < self._plan.gpus:
                # They were told before the first step, in which all ranks met.
                told = (store.get(f"place-{rank}") for rank in range(self._plan.gpus))
                self._places = [Place(**json.loads(place)) for place in told]
            store.set(key, self._look())
        return str(store.get(key).decode())

    def _look(self) -> str:
        passing = None if self._passing is None else self._passing.at(self._places)
        return why_end(self._clock.so_far(), self._plan.warmup_steps, passing)


# Injected faults at work: a share of each step burnt, memory held, a rank that hangs. The gate's own test.


# Steps to learn the step time from; all of them warm-up.
_LEARN_FROM, _LEARN_TO = 1, 3

# Burnt by matrix products and not by waiting: a chip at its power limit turns a wait into higher clocks, and an 8 %
# wait was seen to cost 6 %.
_SIDE, _TRIAL_PRODUCTS = 4096, 100


class Burner:
    """Burns a share of each step on ``device``, called at a step's end."""

    def __init__(self, device: torch.device, clock: Clock[Any], *, slow: float, hold: int, hang: int) -> None:
        """``slow`` is a share of the step time, ``hold`` bytes, ``hang`` the step that never ends."""
        self._share, self._hang, self._device, self._clock = slow, hang, device, clock
        self._held = torch.zeros(hold, dtype=torch.uint8, device=device) if hold else None
        self._seconds, self._products = 0.0, 0
        self._matrix = torch.empty(0)

    def step(self, step: int) -> None:
        if step == self._hang:
            _hang()
        if step == _LEARN_TO and self._share:
            self._learn()
        if self._products:
            self._multiply(self._products)
        elif self._seconds:
            end = time.perf_counter() + self._seconds
            while time.perf_counter() < end:
                pass

    def _learn(self) -> None:
        self._clock.wait()
        seconds = self._share * median(self._clock.so_far()[_LEARN_FROM:])
        if not is_gpu(self._device):
            self._seconds = seconds
            return
        self._matrix = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device=self._device)
        start = self._clock.instant()
        self._multiply(_TRIAL_PRODUCTS)
        end = self._clock.instant()
        self._clock.wait()
        self._products = round(seconds * _TRIAL_PRODUCTS / self._clock.between(start, end))

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.matmul(self._matrix, self._matrix)


def _hang() -> None:
    """As a rank that waits for something that never comes; a signal's handler still runs."""
    while True:
        time.sleep(1)
