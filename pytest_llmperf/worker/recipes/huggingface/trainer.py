"""One rank's training of a spec by the Trainer, which drives ``observe`` and is not slowed by it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, set_seed

from pytest_llmperf.observe.reference_work import hardware_rates
from pytest_llmperf.observe.training import Burner, ObservedTraining, Plan
from pytest_llmperf.observe.vital_signs import Heartbeat
from pytest_llmperf.records.launch import diary_of
from pytest_llmperf.records.ranks import Later, RefusedError, Request, Trained
from pytest_llmperf.settings.train_spec import Injection, TrainSpec
from pytest_llmperf.worker.build import build_model, trainer_of, training_arguments, unused_settings
from pytest_llmperf.worker.evidence import last_kernels, watched
from pytest_llmperf.worker.recipes.huggingface.data import REAL_TOKENS, TrainingData, bind_workers, training_data
from pytest_llmperf.worker.recipes.huggingface.inspection import INSPECTED_STEPS, Inspection, documents
from pytest_llmperf.worker.settings.compilation import prepare_layers
from pytest_llmperf.worker.settings.parallelism import sharing


def train(
    spec: TrainSpec,
    request: Request,
    device: torch.device,
    beat: Heartbeat,
    measured: Callable[[Trained], None] = lambda _: None,
) -> Trained:
    """Train ``spec``, the request's or nearly, on this rank and return what was seen. What was ``measured`` is told
    before untimed steps: what breaks or hangs in these takes nothing from it."""
    set_seed(spec.seed)
    beat.step, beat.steps, beat.compiles = 0, spec.steps, spec.compiles
    beat.tokens_per_step = spec.sequences_per_step * spec.sequence_length

    plan, inspection = _plan(spec, request), Inspection(spec) if request.inspect else None
    steps = plan.steps + plan.traced_steps + (INSPECTED_STEPS if inspection else 0)
    # Before the model: they decide TF32 and start the process group.
    arguments = training_arguments(spec, request.folder, device, steps)
    plan = replace(plan, fetches_ahead=arguments.dataloader_num_workers > 0)
    rates = hardware_rates(device, request.calibrations, request.folder.parent, beat)
    observed = ObservedTraining(plan, device, beat, [("inspecting", inspection)] if inspection else ())
    model = build_model(spec, request.model_config, device)
    remarks = list(unused_settings(request.model_config, model))
    prepare_layers(spec, model)
    with observed.memory.apart():  # what reads a text is there in the first launch of it alone
        data = training_data(spec, steps, model.config.get_text_config().vocab_size)
    evidence, num_parameters = watched(spec, model), model.num_parameters()

    @cache  # what stays the same is gathered once
    def seen() -> Trained:
        facts = evidence(trainer)
        facts |= data.evidence(len(observed.measurement.step_seconds) * spec.sequences_per_step)
        facts |= observed.ending.evidence | ({"remarks": remarks} if remarks else {})
        return observed.trained(rates, parameters=num_parameters, evidence=facts)

    observed.measured = lambda: measured(seen())
    asked = Injection.from_environment(spec.gpus)
    if asked.concerns(plan.rank):
        observed.burner = Burner(device, observed.clock, slow=asked.slow, hold=asked.hold, hang=asked.hang)
    marks = StepMarks(observed, inspection)
    trainer = trainer_of(WatchedTrainer, spec, model, arguments, data=data, marks=marks)
    failed = trainer.train_watched(spec)
    beat.enter("finishing")  # what follows is no part of the training
    later = Later(trace=observed.trace(failed))
    if inspection:
        later = replace(later, learning=inspection.learning(trainer, model, failed))
    # Last of all one more sequence is tried.
    last = last_kernels(trainer, model) | documents(spec, trainer, model)
    return replace(seen(), later=replace(later, kernels=last))


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
        diary=diary_of(request.folder, int(os.environ["RANK"])),
        exchanges=spec.gpus > 1 and spec.parallelism == "ddp",
    )


# How DistributedDataParallel says that weights had no part in the loss; it numbers those that it reduces.
_UNREDUCED = re.compile(r"(?s)Expected to have finished reduction.*did not receive grad for rank \d+:((?: \d+)+)")

# How operators say that what they are given has several types.
_SEVERAL_TYPES = re.compile(r"same dtype|expected scalar type")


def explained(trainer: Trainer, spec: TrainSpec, error: Exception) -> Exception:
    """``error``, or what it means where it comes of weights that no step reaches, or of types that do not mix."""
    model_type = trainer.model.config.model_type
    types = sorted({str(parameter.dtype) for parameter in trainer.model.parameters()})
    if _SEVERAL_TYPES.search(str(error)) and len(types) > 1 and not (trainer.args.bf16 or trainer.args.fp16):
        return RefusedError(
            f"{model_type} keeps weights in {' and '.join(types)}, and its code does not convert between them; "
            "use mixed_precision='bf16'"
        )
    found = _UNREDUCED.search(str(error))
    names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    missing = [names[int(number)] for number in found[1].split() if int(number) < len(names)] if found else []
    if not (missing := missing or names * ("does not require grad" in str(error))):  # the loss itself comes of none
        return error
    usual = "a causal language model without parts for other input, and of kernels ones with a backward pass"
    return RefusedError(
        f"{model_type}: {len(missing)} of {len(names)} weights get no gradient from text (first: {missing[0]}); "
        f"expected {f'a backward pass of hub_kernels={spec.hub_kernels}' if spec.hub_kernels else usual}"
    )


class WatchedTrainer(Trainer):
    """Tells of each micro-batch its loss, which stays on its device, and the tokens it was given."""

    def __init__(self, data: TrainingData, marks: StepMarks, **given: Any) -> None:
        super().__init__(train_dataset=data.samples, data_collator=data.collator, callbacks=[marks], **given)
        self._observed, self._inspection = marks.observed, marks.inspection
        self._sharing = sharing(self)
        # Of whole rows, which DeepSpeed's loader was told, and which it has divided.
        self._length = self.args.parallelism_config.sp_handler.sp_seq_length if self.get_sp_size() > 1 else 0
        self._given, self.parts = 0, 1
        """``parts``: into how many each sequence of the last pass was divided before a model was given it."""

    def _own(self, tokens: int) -> int:
        """This rank's of ``tokens``, which several may compute together: theirs add up to all."""
        return (tokens + self.args.process_index % self._sharing) // self._sharing

    @property
    def _inspected(self) -> Inspection | None:
        """While its step runs."""
        return self._inspection if self._inspection and self._inspection.is_running else None

    def train_watched(self, spec: TrainSpec) -> Exception | None:
        """Train; where no other rank waits for this one, return what has ended a step that is not timed."""
        try:
            self.train()
        except Exception as error:
            if not (spec.gpus == 1 and self._observed.measurement.is_over):
                raise explained(self, spec, error) from error
            return error
        return None

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        bind_workers(loader)
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._observed.batches_asked()
        return super().get_batch_samples(*args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Where ranks meet before the forward pass; a Trainer that has it no more lets that meeting go unseen."""
        self._observed.ranks_meet()
        return super()._get_num_items_in_batch(*args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self._observed.pass_began(model.parameters())
        real_tokens = inputs.pop(REAL_TOKENS, None)  # the host's own number, and no input of the model's
        rows, length = inputs["input_ids"].shape
        tokens = rows * max(length, self._length)  # before ranks divide them among themselves
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.parts = tokens // self._given
        self._observed.pass_ended(loss, self._own(tokens), None if real_tokens is None else self._own(real_tokens))
        if self._inspected:
            self._inspected.end_pass(self.model)
        return loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = super()._prepare_inputs(inputs)
        if self._inspected and self.get_cp_size() == 1:
            self._inspected.begin_pass(given)
        return given

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> Any:
        if self._inspected and self.get_cp_size() > 1:  # before they are divided
            self._inspected.begin_pass(inputs)
        return super()._prepare_context_parallel_inputs(model, inputs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._given = inputs["input_ids"].numel()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self._inspected:
            self._inspected.end_forward(self.model)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self._observed.measurement.end_gradients(norm)
        if self._inspected:
            self._inspected.before_update(self, self.model)
        return norm

    def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> SequentialSampler:
        """In the order of the indices: a shuffle's depends on how many samples there are, and so on the steps."""
        return SequentialSampler(self.train_dataset)


@dataclass(eq=False)
class StepMarks(TrainerCallback):
    observed: ObservedTraining
    inspection: Inspection | None

    def on_step_begin(self, _args: Any, state: TrainerState, _control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 0:
            if self.inspection:
                with self.observed.memory.apart():
                    self.inspection.before(model)
            self.observed.begin()
        elif self.inspection and self.inspection.is_running:
            self.inspection.begin_step(model)

    def on_step_end(self, _args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        came = self.observed.step_ended(state.global_step)
        if came != "goes on":
            control.should_training_stop = came == "over" or not self.observed.go_on()
