"""One rank's training of a spec: built, trained by the Trainer, and what there is to tell of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, set_seed

from pytest_llmperf.observe.calibration import calibrated, run_canary
from pytest_llmperf.observe.device import clock_of, memory_of
from pytest_llmperf.observe.environment import place_of
from pytest_llmperf.observe.heartbeat import Heartbeat
from pytest_llmperf.observe.instruments import Clock
from pytest_llmperf.observe.measurement import Exchange, Later, Measurement, Trained
from pytest_llmperf.observe.tracer import STEPS as TRACED_STEPS
from pytest_llmperf.observe.tracer import Fetches, Tracer, with_timed_waits
from pytest_llmperf.observe.training import Burner, Ending, ObservedTraining
from pytest_llmperf.records.calibration import OF_THE_RUN
from pytest_llmperf.records.learning import UNWANTED as UNINSPECTED
from pytest_llmperf.records.learning import uninspected
from pytest_llmperf.records.trace import UNWANTED, Trace
from pytest_llmperf.settings.fault_injection import Injection
from pytest_llmperf.settings.parallelism import is_sharded
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker import data_workers, refusal
from pytest_llmperf.worker.build import build_model, training_arguments
from pytest_llmperf.worker.evidence import Witnesses
from pytest_llmperf.worker.folder import Request
from pytest_llmperf.worker.recipes.huggingface.data import training_data
from pytest_llmperf.worker.recipes.huggingface.inspection import STEPS as INSPECTED_STEPS
from pytest_llmperf.worker.recipes.huggingface.inspection import Inspection
from pytest_llmperf.worker.recipes.huggingface.trainer import Checkpoint, StepMarks, WatchedTrainer
from pytest_llmperf.worker.settings.attention import attention_kernel, choose_sdpa, found_settings
from pytest_llmperf.worker.settings.compilation import compile_layers
from pytest_llmperf.worker.settings.precision import force_tf32
from pytest_llmperf.worker.unused_settings import unused_settings


def train(
    spec: TrainSpec,
    request: Request,
    device: torch.device,
    beat: Heartbeat,
    measured: Callable[[Trained], None] = lambda _: None,
) -> Trained:
    """As ``worker.job.Recipe`` has it."""
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
    hardware = _hardware(request, device, beat)
    clock, memory = clock_of(device), memory_of(device)
    beat.reserved_bytes = memory.now
    choose_sdpa(spec)
    model = build_model(spec, request.model_config, device)
    remarks = unused_settings(request.model_config, model)
    compile_layers(spec, model)
    # Gradients are exchanged as the backward pass ends, and no weights before; FSDP gathers layer by layer.
    exchange = Exchange(clock) if spec.gpus > 1 and not is_sharded(spec) else None
    ending = Ending(spec, clock, rank, place_of(device), request.passing, all_steps=request.all_steps)
    measurement = Measurement(clock, memory, exchange)
    is_saved = spec.save_checkpoint and not request.search
    checkpoint = Checkpoint(spec.id, Path(str(arguments.output_dir))) if is_saved else None

    with memory.apart():  # what reads a text is there in the first launch of it alone
        data = training_data(spec, steps, model.config.get_text_config().vocab_size)

    witnesses = Witnesses(spec, model)
    kept: list[Trained] = []

    def seen() -> Trained:
        facts = witnesses.collect(trainer, model)
        facts |= data.evidence(len(measurement.step_seconds) * spec.sequences_per_step) | ending.evidence
        facts |= checkpoint.evidence if checkpoint else {}
        facts |= {"remarks": list(remarks)} if remarks else {}
        passes, size = spec.gradient_accumulation_steps, model.num_parameters()
        return measurement.trained(passes, parameters=size, evidence=facts, **hardware)

    def tell() -> None:
        kept.append(seen())
        measured(kept[0])

    fetches = Fetches(tracer, ahead=spec.data_workers > 0)
    later = [("tracing", tracer), ("inspecting", inspection)]
    observed = ObservedTraining(
        measurement,
        beat,
        ending,
        fetches,
        exchange=exchange,
        burner=_burner(spec, rank, device, clock),
        later=[(phase, each) for phase, each in later if each is not None],
        measured=tell,
    )
    trainer = WatchedTrainer(
        model=model,
        args=arguments,
        train_dataset=data.samples,
        data_collator=data.collator,
        callbacks=[StepMarks(observed, beat, checkpoint, inspection)],
        observed=observed,
        inspection=inspection,
    )
    force_tf32(spec, device)
    failed = _trained(trainer, measurement, alone=spec.gpus == 1)
    beat.enter("finishing")  # what follows is no part of the training
    trace = tracer.trace(failed) if tracer else Trace(none=UNWANTED)
    trace = with_timed_waits(trace, fetches.seconds, measurement.step_seconds, spec.warmup_steps)
    learning = inspection.learning(trainer, model, failed) if inspection else uninspected(UNINSPECTED)
    # Last of all one more sequence is tried.
    return replace(kept[0] if kept else seen(), later=Later(attention_kernel(trainer, model), trace, learning))


def _hardware(request: Request, device: torch.device, beat: Heartbeat) -> dict[str, Any]:
    """What the device gives to work that is no training."""
    canary = run_canary(device)
    if not request.calibrations:
        return {"canary": canary}
    of_run = request.folder.parent / OF_THE_RUN
    calibration = calibrated(device, Path(request.calibrations), lambda: beat.enter("calibrating"), of_run)
    beat.enter("assembling")
    return {"canary": canary, "calibration": calibration}


def _burner(spec: TrainSpec, rank: int, device: torch.device, clock: Clock[Any]) -> Burner | None:
    asked = Injection.from_environment(spec.gpus)
    if not asked.concerns(rank):
        return None
    return Burner(device, clock, slow=asked.slow, hold=asked.hold, hang=asked.hang)


def _trained(trainer: Trainer, measurement: Measurement, *, alone: bool) -> Exception | None:
    """Train, and return what has ended a step that is not timed: that takes nothing from what was measured before."""
    try:
        with data_workers.explained():
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
