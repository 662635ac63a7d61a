"""A small training by the Trainer that measures large ones, with what each of its steps did to each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.pytorch_utils import Conv1D

from pytest_llmperf.spec.small_spec import SEQUENCES
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support.units import GIB
from pytest_llmperf.worker.build import (
    DTYPES,
    build_model,
    choose_sdpa,
    compile_layers,
    force_tf32,
    training_arguments,
)
from pytest_llmperf.worker.parity.double_precision import DoublePrecision
from pytest_llmperf.worker.parity.gathered_weights import as_gathered, plain_name
from pytest_llmperf.worker.parity.initial_weights import set_initial_weights
from pytest_llmperf.worker.parity.uneven_rows import UnevenRows
from pytest_llmperf.worker.train import WatchedTrainer

Tensors = Mapping[str, torch.Tensor]

_HOST = torch.device("cpu")

#: Beside the Trainer's defaults. An update is many times what fp32 weights can tell apart, weights decay enough for
#: that to be seen, and no gradient is as short as its limit: whoever clips otherwise, or not at all, is seen too.
LEARNING_RATE, WEIGHT_DECAY, LONGEST_GRADIENT = 1e-3, 0.1, 0.1


# What is kept of a training fills no more of a device than this; else the host keeps it.
_MOST_KEPT_BYTES = 2 * GIB


@dataclass
class SmallSteps:
    """What each step did, as this rank saw it; tensors are whole ones in double precision."""

    device: torch.device = _HOST
    """Where they are kept."""
    losses: list[float] = field(default_factory=list)
    """This rank's share; the mean over the ranks is the step's."""
    gradients: list[Tensors] = field(default_factory=list)
    """Before they are clipped."""
    clipped: list[Tensors] = field(default_factory=list)
    """The same as the optimizer is given them."""
    weights: list[Tensors] = field(default_factory=list)
    """Before the step."""
    updates: list[Tensors] = field(default_factory=list)
    decaying: frozenset[str] = frozenset()
    """Parameters that decay."""
    product_types: dict[str, str] = field(default_factory=dict)
    """In which type each linear layer's products came out, by its name."""


class SmallTrainer(Trainer):
    """Tells of each step its loss and its gradients."""

    def __init__(self, *args: Any, seen: SmallSteps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen, self._inner, self._losses = seen, kwargs["model"], list[torch.Tensor]()

    # In the order of the indices, as what is measured.
    _get_train_sampler = WatchedTrainer._get_train_sampler  # noqa: SLF001

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self._losses.append(loss.detach())
        if self.accelerator.sync_gradients:
            self._seen.losses.append(float(sum(self._losses)))
            self._losses.clear()
            scale = self._scale()
            found = gradients_of(self._inner, self._seen.device)
            self._seen.gradients.append({name: one / scale for name, one in found.items()} if scale != 1 else found)
        return loss

    def _scale(self) -> float:
        scaler = getattr(self.accelerator, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())


class _Watch(TrainerCallback):
    """Sees weights where an update begins and ends."""

    def __init__(self, model: nn.Module, seen: SmallSteps) -> None:
        self._model, self._seen = model, seen

    def on_step_begin(self, _args: TrainingArguments, _state: TrainerState, _c: TrainerControl, **_: Any) -> None:
        self._seen.weights.append(whole(self._model, self._seen.device))

    def on_pre_optimizer_step(
        self, _args: TrainingArguments, _state: TrainerState, _c: TrainerControl, **_: Any
    ) -> None:
        self._seen.clipped.append(gradients_of(self._model, self._seen.device))

    def on_step_end(self, _args: TrainingArguments, _state: TrainerState, _c: TrainerControl, **_: Any) -> None:
        before, after = self._seen.weights[-1], whole(self._model, self._seen.device)
        self._seen.updates.append({name: after[name] - before[name] for name in after})


def whole(model: nn.Module, device: torch.device = _HOST) -> dict[str, torch.Tensor]:
    """Its parameters in double precision on ``device``, gathered from whoever holds parts of them."""
    return {plain_name(name): _kept(parameter, device) for name, parameter in model.named_parameters()}


def gradients_of(model: nn.Module, device: torch.device = _HOST) -> dict[str, torch.Tensor]:
    """Those that there are."""
    found = {plain_name(name): parameter.grad for name, parameter in model.named_parameters()}
    return {name: _kept(gradient, device) for name, gradient in found.items() if gradient is not None}


def _kept(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.to(device=device, dtype=torch.float64, copy=True)


def place_for(num_parameters: int, steps: int, device: torch.device) -> torch.device:
    """Where weights, updates, and gradients before and after clipping are kept: on ``device``, or the host."""
    kept_bytes = 4 * steps * num_parameters * torch.float64.itemsize
    return device if kept_bytes <= _MOST_KEPT_BYTES else _HOST


def train_small(  # noqa: PLR0913 - what to train, where, and how otherwise
    spec: TrainSpec,
    config: Mapping[str, Any],
    folder: Path,
    device: torch.device,
    *,
    is_plain: bool = False,
    double: bool = False,
    gathered: str = "no",
) -> SmallSteps:
    """What the steps of ``spec``, small already, did with a model of ``config``.

    ``is_plain``: of experts each computes by itself, as attention does that is eager. ``double``: in double precision,
    whatever the spec says. ``gathered``: with copies of its weights in that type, as ``as_gathered`` makes them.
    """
    torch.compiler.reset()
    set_seed(spec.seed)
    arguments = training_arguments(spec, folder, device, spec.steps)
    arguments.learning_rate, arguments.weight_decay = LEARNING_RATE, WEIGHT_DECAY
    arguments.max_grad_norm = LONGEST_GRADIENT
    choose_sdpa(spec.sdpa_backend)
    with DoublePrecision() if double else nullcontext():
        model = build_model(spec, config, device)
        if is_plain:
            model.config._experts_implementation = "eager"  # noqa: SLF001 - as transformers' own loading sets it
        set_initial_weights(model, spec.seed)
        if double:
            model.double()
        if gathered != "no":
            as_gathered(model, DTYPES[gathered])
        if spec.torch_compile and spec.torch_compile_scope == "layers":
            compile_layers(model, spec.torch_compile_mode)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        seen = SmallSteps(device=place_for(num_parameters, spec.steps, device))
        if not spec.torch_compile:  # a look from inside would change what is compiled
            _watch_products(model, seen)
        trainer = SmallTrainer(
            model=model,
            args=arguments,
            train_dataset=UnevenRows(
                length=SEQUENCES * (spec.steps + 1),
                sequence_length=spec.sequence_length,
                vocabulary_size=model.config.get_text_config().vocab_size,
                seed=spec.seed,
            ),
            callbacks=[_Watch(model, seen)],
            seen=seen,
        )
        seen.decaying = frozenset(map(plain_name, trainer.get_decay_parameter_names(model)))
        if device.type == "cuda":
            force_tf32(spec)
        trainer.train()
    return seen


def _watch_products(model: PreTrainedModel, seen: SmallSteps) -> None:
    def look(name: str, dtype: torch.dtype) -> None:
        seen.product_types[plain_name(name)] = str(dtype).removeprefix("torch.")

    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            module.register_forward_hook(lambda _m, _i, output, name=name: look(name, output.dtype))
