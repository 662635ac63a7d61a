"""StepMarks: what happens where steps begin and end; the clock's marks, and what comes after those that are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pytest_llmperf.worker.checkpoint import Checkpoint
from pytest_llmperf.worker.faults import Burner
from pytest_llmperf.worker.heartbeat import Heartbeat
from pytest_llmperf.worker.learning.inspection import Inspection
from pytest_llmperf.worker.measuring.measurement import Measurement
from pytest_llmperf.worker.measuring.stopping import Stopping
from pytest_llmperf.worker.tracing.tracer import Tracer


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
