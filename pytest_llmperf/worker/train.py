"""One rank's training run: the Trainer, watched without being slowed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, set_seed

from pytest_llmperf.observe.device import clock_of, memory_of
from pytest_llmperf.observe.instruments import Clock
from pytest_llmperf.records.calibration import OF_THE_RUN, Calibration
from pytest_llmperf.records.learning.learning import UNWANTED as UNINSPECTED
from pytest_llmperf.records.learning.learning import uninspected
from pytest_llmperf.records.trace import UNWANTED, Trace
from pytest_llmperf.settings.fault_injection import Injection
from pytest_llmperf.settings.parallelism import is_sharded
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker import refusal
from pytest_llmperf.worker.build import build_model, training_arguments
from pytest_llmperf.worker.checkpoint import Checkpoint
from pytest_llmperf.worker.data import data_workers
from pytest_llmperf.worker.data.text import REAL_TOKENS
from pytest_llmperf.worker.data.training_data import training_data
from pytest_llmperf.worker.environment import place_of
from pytest_llmperf.worker.heartbeat import Heartbeat
from pytest_llmperf.worker.learning.inspection import STEPS as INSPECTED_STEPS
from pytest_llmperf.worker.learning.inspection import Inspection
from pytest_llmperf.worker.measuring.calibrator import calibrated
from pytest_llmperf.worker.measuring.canary import sing
from pytest_llmperf.worker.measuring.measurement import Exchange, Measurement, ObservedTraining, Stopping
from pytest_llmperf.worker.request import Request, Trained
from pytest_llmperf.worker.settings.attention import choose_sdpa, found_settings
from pytest_llmperf.worker.settings.compilation import compile_layers
from pytest_llmperf.worker.settings.precision import force_tf32
from pytest_llmperf.worker.step_marks import After, Burner, StepMarks
from pytest_llmperf.worker.tracer import STEPS as TRACED_STEPS
from pytest_llmperf.worker.tracer import Fetches, Tracer, with_timed_waits
from pytest_llmperf.worker.unused_settings import unused_settings


class WatchedTrainer(Trainer):
    """The Trainer, telling of each micro-batch its loss, which stays on its device, and the tokens it was given."""

    def __init__(
        self, *args: Any, measurement: Measurement, fetches: Fetches, inspection: Inspection | None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._measurement, self._exchange = measurement, measurement.exchange
        self._fetches, self._inspection = fetches, inspection

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        data_workers.bind(loader)
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._fetches.begin()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self._fetches.end()
        if self._exchange and not self._measurement.losses:
            self._exchange.watch(model.parameters())
        if self._exchange:
            self._exchange.leave()
        real_tokens = inputs.pop(REAL_TOKENS, None)  # the host's own number, and no input of the model's
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self._exchange:
            self._exchange.end_pass()
        self._measurement.end_pass(loss, inputs["input_ids"].numel(), real_tokens)
        if self._inspection and self._inspection.is_running:
            self._inspection.end_pass(self.model)
        return loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = super()._prepare_inputs(inputs)
        if self._inspection and self._inspection.is_running:
            self._inspection.begin_pass(given)
        return given

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self._inspection and self._inspection.is_running:
            self._inspection.end_forward(self.model)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self._measurement.end_gradients(norm)
        if self._inspection and self._inspection.is_running:
            self._inspection.before_update(self, self.model)
        return norm

    def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> SequentialSampler:
        """In the order of the indices: a shuffle's depends on how many samples there are, and so on the steps."""
        return SequentialSampler(self.train_dataset)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Where ranks meet before the forward pass; a Trainer that has it no more lets that meeting go unseen."""
        self._fetches.end()
        if self._exchange:
            self._exchange.arrive()
        return super()._get_num_items_in_batch(*args, **kwargs)


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
    inspection = Inspection(spec) if request.inspect else None
    steps = spec.steps + (TRACED_STEPS if tracer else 0) + (INSPECTED_STEPS if inspection else 0)
    found_settings()
    arguments = training_arguments(spec, request.folder, device, steps)
    canary = sing(device)
    calibration = _calibrated(request, device, beat)
    clock, memory = clock_of(device), memory_of(device)
    beat.reserved_bytes = memory.now
    choose_sdpa(spec)
    model = build_model(spec, request.model_config, device)
    remarks = unused_settings(request.model_config, model)
    compile_layers(spec, model)
    exchange = Exchange(clock) if _exchanges_at_the_end(spec) else None
    stopping = Stopping(spec, clock, rank, place_of(device), request.passing, all_steps=request.all_steps)
    measurement = Measurement(clock, memory, exchange)
    is_saved = spec.save_checkpoint and not request.search
    checkpoint = Checkpoint(spec.id, Path(str(arguments.output_dir))) if is_saved else None

    with memory.apart():  # what reads a text is there in the first launch of it alone
        data = training_data(spec, steps, model.config.get_text_config().vocab_size)

    observation = ObservedTraining(
        spec, model, measurement, stopping, checkpoint, canary, calibration, measured, data, remarks
    )

    def keep() -> None:
        observation.keep(trainer)

    fetches = Fetches(tracer, ahead=spec.data_workers > 0)
    after = After(checkpoint, tracer, inspection, keep)
    marks = StepMarks(measurement, beat, stopping, _burner(spec, rank, device, clock), after)
    trainer = WatchedTrainer(
        model=model,
        args=arguments,
        train_dataset=data.samples,
        data_collator=data.collator,
        callbacks=[marks],
        measurement=measurement,
        fetches=fetches,
        inspection=inspection,
    )
    force_tf32(spec, device)
    failed = _trained(trainer, measurement, alone=spec.gpus == 1)
    beat.enter("finishing")  # what follows is no part of the training
    trace = tracer.trace(failed) if tracer else Trace(none=UNWANTED)
    trace = with_timed_waits(trace, fetches.seconds, measurement.step_seconds, spec.warmup_steps)
    learning = inspection.learning(trainer, model, failed) if inspection else uninspected(UNINSPECTED)
    return observation.ended(trainer, trace, learning)


def _calibrated(request: Request, device: torch.device, beat: Heartbeat) -> Calibration | None:
    if not request.calibrations:
        return None
    of_run = request.folder.parent / OF_THE_RUN
    calibration = calibrated(device, Path(request.calibrations), lambda: beat.enter("calibrating"), of_run)
    beat.enter("assembling")
    return calibration


def _trained(trainer: Trainer, measurement: Measurement, *, alone: bool) -> Exception | None:
    """Train, and return what has ended a step that is not timed: that takes nothing from what was measured before."""
    try:
        with data_workers.told():
            trainer.train()
    except Exception as error:
        # Ranks that others wait for have to fail; what was measured is kept.
        if not (alone and measurement.is_over):
            raise _explained(error, trainer) from error
        return error
    return None


# How DistributedDataParallel says that weights had no part in the loss; it numbers those that it reduces.
_UNREDUCED = re.compile(
    r"Expected to have finished reduction.*did not receive grad for rank \d+:((?: \d+)+)", re.DOTALL
)


# How operators say that what they are given has several types.
_SEVERAL_TYPES = re.compile(r"same dtype|expected scalar type")


def _explained(error: Exception, trainer: Trainer) -> Exception:
    """``error``, or what it means where it comes of weights that no step reaches, or of types that do not mix."""
    model = trainer.model
    types = sorted({str(parameter.dtype) for parameter in model.parameters()})
    if _SEVERAL_TYPES.search(str(error)) and len(types) > 1 and not (trainer.args.bf16 or trainer.args.fp16):
        return refusal.unmixed(model.config.model_type, types)
    found = _UNREDUCED.search(str(error))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    missing = [names[int(number)] for number in found[1].split() if int(number) < len(names)] if found else []
    return refusal.unused(model.config.model_type, missing, len(names)) if missing else error


def _exchanges_at_the_end(spec: TrainSpec) -> bool:
    """Whether gradients are exchanged as the backward pass ends, and no weights before; FSDP gathers layer by layer."""
    return spec.gpus > 1 and not is_sharded(spec)


def _burner(spec: TrainSpec, rank: int, device: torch.device, clock: Clock[Any]) -> Burner | None:
    injection = Injection.from_environment(spec.gpus)
    return Burner(injection, device, clock) if injection.concerns(rank) else None
