"""One rank's training of a spec: built, trained by the Trainer, and what there is to tell of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from transformers import set_seed

from pytest_llmperf.observe.reference_work import hardware_rates
from pytest_llmperf.observe.training import Burner, ObservedTraining, Plan
from pytest_llmperf.observe.vital_signs import Heartbeat
from pytest_llmperf.records.trained import Later, Trained
from pytest_llmperf.settings.parallelism import is_sharded
from pytest_llmperf.settings.train_spec import Injection, TrainSpec
from pytest_llmperf.worker.build import build_model, training_arguments, unused_settings
from pytest_llmperf.worker.evidence import attention_kernel, watched
from pytest_llmperf.worker.folder import Request
from pytest_llmperf.worker.recipes.huggingface.data import training_data
from pytest_llmperf.worker.recipes.huggingface.inspection import STEPS as INSPECTED_STEPS
from pytest_llmperf.worker.recipes.huggingface.inspection import Inspection
from pytest_llmperf.worker.recipes.huggingface.trainer import Checkpoint, StepMarks, WatchedTrainer
from pytest_llmperf.worker.settings.compilation import compile_layers
from pytest_llmperf.worker.settings.precision import force_tf32


def train(
    spec: TrainSpec,
    request: Request,
    device: torch.device,
    beat: Heartbeat,
    measured: Callable[[Trained], None] = lambda _: None,
) -> Trained:
    """As ``worker.rank_job.Recipe`` has it."""
    set_seed(spec.seed)
    beat.enter("building")
    beat.step, beat.steps, beat.compiles = 0, spec.steps, spec.compiles
    beat.tokens_per_step = spec.sequences_per_step * spec.sequence_length

    plan, inspection = _plan(spec, request), Inspection(spec) if request.inspect else None
    steps = plan.steps + plan.traced_steps + (INSPECTED_STEPS if inspection else 0)
    # Before the model: they decide TF32 and start the process group.
    arguments = training_arguments(spec, request.folder, device, steps)
    rates = hardware_rates(device, request.calibrations, request.folder.parent, beat)
    observed = ObservedTraining(plan, device, beat, [("inspecting", inspection)] if inspection else ())
    model = build_model(spec, request.model_config, device)
    remarks = list(unused_settings(request.model_config, model))
    compile_layers(spec, model)
    checkpoint = None
    if spec.save_checkpoint and not request.search:
        checkpoint = Checkpoint(spec.id, Path(str(arguments.output_dir)))
    with observed.memory.apart():  # what reads a text is there in the first launch of it alone
        data = training_data(spec, steps, model.config.get_text_config().vocab_size)
    evidence = watched(spec, model)

    @cache  # what stays the same is gathered once
    def seen() -> Trained:
        facts = evidence(trainer)
        facts |= data.evidence(len(observed.measurement.step_seconds) * spec.sequences_per_step)
        facts |= observed.ending.evidence | (checkpoint.evidence if checkpoint else {})
        facts |= {"remarks": remarks} if remarks else {}
        return observed.trained(rates, parameters=model.num_parameters(), evidence=facts)

    observed.measured = lambda: measured(seen())
    asked = Injection.from_environment(spec.gpus)
    if asked.concerns(plan.rank):
        observed.burner = Burner(device, observed.clock, slow=asked.slow, hold=asked.hold, hang=asked.hang)
    trainer = WatchedTrainer(model, arguments, data, StepMarks(observed, beat, checkpoint, inspection))
    force_tf32(spec, device)
    failed = trainer.train_watched(alone=spec.gpus == 1)
    beat.enter("finishing")  # what follows is no part of the training
    later = Later(trace=observed.trace(failed))
    if inspection:
        later = replace(later, learning=inspection.learning(trainer, model, failed))
    # Last of all one more sequence is tried.
    return replace(seen(), later=replace(later, attention_kernel=attention_kernel(trainer, model)))


def _plan(spec: TrainSpec, request: Request) -> Plan:
    return Plan(
        steps=spec.steps,
        min_steps=spec.min_steps,
        warmup_steps=spec.warmup_steps,
        ranks=spec.gpus,
        rank=int(os.environ["RANK"]),
        passing=request.passing,
        all_steps=request.all_steps,
        is_traced=request.trace,
        exchanges=spec.gpus > 1 and not is_sharded(spec),
        fetches_ahead=spec.data_workers > 0,
    )
