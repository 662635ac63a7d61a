"""One rank's training run: the Trainer, watched without being slowed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from pytest_llmperf.records.calibration import OF_THE_RUN, Calibration
from pytest_llmperf.records.trace import UNWANTED, Trace
from pytest_llmperf.spec.fault_injection import Injection
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.worker.build import build_model, choose_sdpa, compile_layers, force_tf32, training_arguments
from pytest_llmperf.worker.checkpoint import Checkpoint
from pytest_llmperf.worker.environment import place_of
from pytest_llmperf.worker.faults import Burner
from pytest_llmperf.worker.heartbeat import Heartbeat
from pytest_llmperf.worker.measuring.calibrator import calibrated
from pytest_llmperf.worker.measuring.canary import sing
from pytest_llmperf.worker.measuring.gradient_exchange import Exchange
from pytest_llmperf.worker.measuring.instruments import Clock, CudaClock, CudaMemory, HostClock, HostMemory, Memory
from pytest_llmperf.worker.measuring.measurement import Measurement
from pytest_llmperf.worker.measuring.observed_training import ObservedTraining
from pytest_llmperf.worker.measuring.stopping import Stopping
from pytest_llmperf.worker.random_tokens import RandomTokens
from pytest_llmperf.worker.request import Request
from pytest_llmperf.worker.tracing.tracer import STEPS as TRACED_STEPS
from pytest_llmperf.worker.tracing.tracer import Tracer
from pytest_llmperf.worker.trained import Trained


class WatchedTrainer(Trainer):
    """The Trainer, telling of each micro-batch its loss, which stays on its device, and the tokens it was given."""

    def __init__(self, *args: Any, measurement: Measurement, tracer: Tracer | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._measurement, self._exchange, self._tracer = measurement, measurement.exchange, tracer

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._tracer:
            self._tracer.batch_arrived()
        if self._exchange and not self._measurement.losses:
            self._exchange.watch(model.parameters())
        if self._exchange:
            self._exchange.leave()
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self._exchange:
            self._exchange.end_pass()
        self._measurement.end_pass(loss, inputs["input_ids"].numel())
        return loss

    def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> SequentialSampler:
        """In the order of the indices: a shuffle's depends on how many samples there are, and so on the steps."""
        return SequentialSampler(self.train_dataset)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Where ranks meet before the forward pass; a Trainer that has it no more lets that meeting go unseen."""
        if self._exchange:
            self._exchange.arrive()
        return super()._get_num_items_in_batch(*args, **kwargs)


@dataclass(frozen=True)
class After:
    """What comes after the timed steps."""

    checkpoint: Checkpoint | None
    tracer: Tracer | None
    keep: Callable[[], None]
    """What was measured, before steps are traced."""


class StepMarks(TrainerCallback):
    """Marks the clock where the first step begins and where every step ends; what comes after them begins here too."""

    def __init__(
        self, measurement: Measurement, heartbeat: Heartbeat, stopping: Stopping, burner: Burner | None, after: After
    ) -> None:
        self._measurement, self._heartbeat = measurement, heartbeat
        self._stopping, self._burner = stopping, burner
        self._tracer, self._checkpoint, self._keep = after.tracer, after.checkpoint, after.keep

    def on_step_begin(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if state.global_step == 0:
            if self._checkpoint:
                self._checkpoint.check_room(model)
            self._heartbeat.enter("training")  # before what is timed
            self._measurement.begin()

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **trained: Any
    ) -> None:
        if self._burner is not None:
            self._burner.step(state.global_step)
        if self._tracer and self._tracer.is_running:
            control.should_training_stop = self._tracer.end_step()
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
            self._go_on(control)

    def on_save(self, _args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._checkpoint:
            self._checkpoint.end()
            self._heartbeat.enter("gathering")
            self._checkpoint.remove()
            self._go_on(control)

    def _go_on(self, control: TrainerControl) -> None:
        """With what is neither timed nor saved."""
        if self._tracer is None:
            self._heartbeat.enter("finishing")
            control.should_training_stop = True
        else:
            self._heartbeat.enter("gathering")
            self._keep()
            self._heartbeat.enter("tracing")
            self._tracer.begin()


def train(
    spec: TrainSpec,
    request: Request,
    device: torch.device,
    beat: Heartbeat,
    measured: Callable[[Trained], None] = lambda _: None,
) -> Trained:
    """Train ``spec``, the request's or nearly, on this rank and return what was seen.

    What was ``measured`` is told before steps are traced: what breaks or hangs in these takes nothing from it.
    """
    rank = int(os.environ["RANK"])
    set_seed(spec.seed)
    beat.enter("building")
    beat.step, beat.steps, beat.compiles = 0, spec.steps, spec.compiles
    beat.tokens_per_step = spec.sequences_per_step * spec.sequence_length

    # Before the model: it decides TF32 and starts the process group.
    tracer = Tracer(device) if request.trace else None
    steps = spec.steps + (TRACED_STEPS if tracer else 0)
    arguments = training_arguments(spec, request.folder, device, steps)
    canary = sing(device)
    calibration = _calibrated(request, device, beat)
    clock: Clock[Any] = CudaClock() if device.type == "cuda" else HostClock()
    memory: Memory = CudaMemory() if device.type == "cuda" else HostMemory()
    beat.reserved_bytes = memory.now
    choose_sdpa(spec.sdpa_backend)
    model = build_model(spec, request.model_config, device)
    if spec.torch_compile and spec.torch_compile_scope == "layers":
        compile_layers(model, spec.torch_compile_mode)
    exchange = Exchange(clock) if _exchanges_at_the_end(spec) else None
    stopping = Stopping(spec, clock, rank, place_of(device), request.passing)
    measurement = Measurement(clock, memory, exchange)
    is_saved = spec.save_checkpoint and not request.search
    checkpoint = Checkpoint(spec.id, Path(str(arguments.output_dir))) if is_saved else None

    observation = ObservedTraining(spec, model, measurement, stopping, checkpoint, canary, calibration, measured)

    def keep() -> None:
        observation.keep(trainer)

    after = After(checkpoint, tracer, keep)
    marks = StepMarks(measurement, beat, stopping, _burner(spec, rank, device, clock), after)
    trainer = WatchedTrainer(
        model=model,
        args=arguments,
        train_dataset=_tokens(spec, steps, model.config.get_text_config().vocab_size),
        callbacks=[marks],
        measurement=measurement,
        tracer=tracer,
    )
    if device.type == "cuda":
        force_tf32(spec)
    trace = _trained(trainer, measurement, tracer, alone=spec.gpus == 1)
    beat.enter("finishing")  # what follows is no part of the training
    return observation.ended(trainer, trace)


def _calibrated(request: Request, device: torch.device, beat: Heartbeat) -> Calibration | None:
    if not request.calibrations:
        return None
    of_run = request.folder.parent / OF_THE_RUN
    calibration = calibrated(device, Path(request.calibrations), lambda: beat.enter("calibrating"), of_run)
    beat.enter("assembling")
    return calibration


def _trained(trainer: Trainer, measurement: Measurement, tracer: Tracer | None, *, alone: bool) -> Trace:
    """Train, and return what was traced; what breaks in a traced step takes nothing from what was measured before."""
    failed: Exception | None = None
    try:
        trainer.train()
    except Exception as error:
        # Ranks that others wait for have to fail; what was measured is kept.
        if not (alone and measurement.is_over):
            raise
        failed = error
    return tracer.trace(failed) if tracer else Trace(none=UNWANTED)


def _tokens(spec: TrainSpec, steps: int, vocabulary_size: int) -> RandomTokens:
    return RandomTokens(
        # A step fetches the batch of the next one: the last step should too, as all before.
        length=spec.sequences_per_step * (steps + 1),
        sequence_length=spec.sequence_length,
        vocabulary_size=vocabulary_size,
        seed=spec.seed,
    )


def _exchanges_at_the_end(spec: TrainSpec) -> bool:
    """Whether gradients are exchanged as the backward pass ends, and no weights before; FSDP gathers layer by layer."""
    return spec.gpus > 1 and spec.parallelism == "ddp"


def _burner(spec: TrainSpec, rank: int, device: torch.device, clock: Clock[Any]) -> Burner | None:
    injection = Injection.from_environment(spec.gpus)
    return Burner(injection, device, clock) if injection.concerns(rank) else None
