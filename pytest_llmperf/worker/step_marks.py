"""StepMarks: what happens where steps begin and end; the clock's marks, and what comes after those that are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pytest_llmperf.observe.device import is_gpu
from pytest_llmperf.settings.fault_injection import Injection
from pytest_llmperf.worker.checkpoint import Checkpoint
from pytest_llmperf.worker.heartbeat import Heartbeat
from pytest_llmperf.worker.learning.inspection import Inspection
from pytest_llmperf.worker.measuring.measurement import Measurement, Stopping
from pytest_llmperf.worker.tracer import Tracer

# Injected faults at work: a share of each step burnt, memory held, a rank that hangs. The gate's own test.


# Steps to learn the step time from; all of them warm-up.
_LEARN_FROM, _LEARN_TO = 1, 3

# Burnt by matrix products and not by waiting: a chip at its power limit turns a wait into higher clocks, and an 8 %
# wait was seen to cost 6 %.
_SIDE, _TRIAL_PRODUCTS = 4096, 100


class Burner:
    """Burns a share of each step on ``device``, called at a step's end."""

    def __init__(self, injection: Injection, device: torch.device, clock: Any) -> None:
        self._share, self._device, self._clock = injection.slow, device, clock
        self._hang = injection.hang
        self._held = torch.zeros(injection.hold, dtype=torch.uint8, device=device) if injection.hold else None
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


@dataclass(frozen=True)
class After:
    """What comes after the timed steps."""

    checkpoint: Checkpoint | None
    tracer: Tracer | None
    inspection: Inspection | None
    keep: Callable[[], None]
    """What was measured, before steps that are not timed."""


class Untimed(Protocol):
    """Steps that come after the timed ones."""

    def begin(self) -> None:
        """With the next step."""

    def end_step(self) -> bool:
        """Whether that was the last one."""


class StepMarks(TrainerCallback):
    """Marks the clock where the first step begins and where every step ends; what comes after them begins here too."""

    def __init__(
        self, measurement: Measurement, heartbeat: Heartbeat, stopping: Stopping, burner: Burner | None, after: After
    ) -> None:
        self._measurement, self._heartbeat = measurement, heartbeat
        self._stopping, self._burner = stopping, burner
        self._checkpoint, self._inspection, self._keep = after.checkpoint, after.inspection, after.keep
        steps: list[tuple[str, Untimed | None]] = [("tracing", after.tracer), ("inspecting", after.inspection)]
        self._coming = [(phase, each) for phase, each in steps if each is not None]
        self._running: Untimed | None = None

    def on_step_begin(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if state.global_step == 0:
            if self._checkpoint:
                self._checkpoint.check_room(model)
            if self._inspection:
                self._inspection.before(model)
            self._heartbeat.enter("training")  # before what is timed
            self._measurement.begin()
        elif self._inspection and self._running is self._inspection:
            self._inspection.begin_step(model)

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **trained: Any
    ) -> None:
        if self._burner is not None:
            self._burner.step(state.global_step)
        if self._running:
            if self._running.end_step():
                self._go_on(control)
            return
        self._measurement.end_step()
        self._heartbeat.step = state.global_step
        if not self._stopping.now(state.global_step):
            return
        self._measurement.end()
        if self._checkpoint:
            self._checkpoint.check_room(trained["model"], trained["optimizer"])
            self._heartbeat.enter("saving")
            control.should_save = True
        else:
            self._end_timed(control)

    def on_save(self, _args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._checkpoint:
            self._checkpoint.end()
            self._heartbeat.enter("gathering")
            self._checkpoint.remove()
            self._end_timed(control)

    def _end_timed(self, control: TrainerControl) -> None:
        """What comes now is neither timed nor saved."""
        if self._coming:
            self._heartbeat.enter("gathering")
            self._keep()
        self._go_on(control)

    def _go_on(self, control: TrainerControl) -> None:
        if not self._coming:
            self._heartbeat.enter("finishing")
            control.should_training_stop = True
            return
        phase, self._running = self._coming.pop(0)
        self._heartbeat.enter(phase)
        self._running.begin()
