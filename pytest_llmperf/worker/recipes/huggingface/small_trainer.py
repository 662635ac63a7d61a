"""A small training by the Trainer that measures large ones, with what each of its steps did to each tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, set_seed
from transformers.optimization import Adafactor
from transformers.pytorch_utils import Conv1D

from pytest_llmperf.settings.batch import SEQUENCES
from pytest_llmperf.settings.optimizer import MUON
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.formats import GIB
from pytest_llmperf.worker.build import build_model, trainer_of, training_arguments
from pytest_llmperf.worker.recipes.huggingface.trainer import WatchedTrainer, explained
from pytest_llmperf.worker.settings.compilation import prepare_layers
from pytest_llmperf.worker.settings.optimizer import MuonAndAdamW, hidden_matrices
from pytest_llmperf.worker.settings.precision import DTYPES


class DoublePrecision(TorchFunctionMode):
    """While it is on, whoever asks for fp32 is given fp64, as transformers' norms, softmax and losses do."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        wider = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **wider)


_ADDED = "parametrizations"
_WRAPPERS = frozenset({_ADDED, "_orig_mod", "_checkpoint_wrapped_module"})


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.to(self._dtype)


def as_gathered(model: nn.Module, dtype: torch.dtype) -> None:
    """Let ``model`` compute with copies of its parameters in ``dtype``: the plain form of FSDP in mixed precision."""
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            parametrize.register_parametrization(module, name, _Cast(dtype), unsafe=True)  # another type comes out


def plain_name(name: str) -> str:
    """A parameter's name without what wraps it, or what makes it another type."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[:-1] if _ADDED in name and parts[-1] == "original" else parts)


def set_initial_weights(model: nn.Module, seed: int) -> None:
    """Give each parameter of ``model`` values that depend on ``seed`` and the parameters' order alone, to the last bit.
    Matrices keep what passes through them at its size, or attention would look everywhere alike at these widths. What
    begins as one or zero differs from element to element, so that it matters which of them is used where."""
    parameters = list(model.parameters())
    drawn = _drawn(seed, tuple(parameter.shape for parameter in parameters))
    with torch.no_grad():
        for parameter, values in zip(parameters, drawn, strict=True):
            if parameter.ndim > 1:
                wide = values * parameter.shape[-1] ** -0.5
            else:
                wide = parameter.detach().float().cpu() + 0.1 * values
            # What fp16's range and bf16's digits both hold, wider types hold too.
            value = wide.to(torch.float16).to(torch.bfloat16).float()
            if isinstance(parameter, DTensor):  # of layers that ranks share already
                value = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


@lru_cache(maxsize=1)  # several trainings in turn are of one seed
def _drawn(seed: int, shapes: tuple[torch.Size, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


# What a row is filled up with, and what its labels say there, which is no part of the loss; one row in so many is full.
_PADDING, _IGNORED, _FULL = 0, -100, 4


class UnevenRows(Dataset[dict[str, torch.Tensor]]):
    """``length`` rows of random tokens, down to an eighth as long: equal ones would hide how losses are averaged. No
    mask: nothing that counts sees the padding that follows it."""

    def __init__(self, *, length: int, sequence_length: int, vocabulary_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._rows = []
        for number in range(length):
            tokens = torch.randint(vocabulary_size, (sequence_length,), generator=generator)
            counted = int(torch.randint(max(2, sequence_length // 8), sequence_length + 1, (), generator=generator))
            labels = tokens.clone()
            if number % _FULL:
                tokens[counted:], labels[counted:] = _PADDING, _IGNORED
            self._rows.append({"input_ids": tokens, "labels": labels})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index]


Tensors = Mapping[str, torch.Tensor]

_HOST = torch.device("cpu")

#: Beside the Trainer's defaults. An update is many times what fp32 weights can tell apart, weights decay enough for
#: that to be seen, and no gradient is as short as its limit: whoever clips otherwise is seen too.
LEARNING_RATE, WEIGHT_DECAY, LONGEST_GRADIENT = 1e-3, 0.1, 0.1

# As transformers' arguments have them where nobody says otherwise; told here, since a fault may be in those.
_ADAM: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}

# One tensor at a time, as on a CPU: what a GPU chooses by itself is a faster form.
_PLAIN: Mapping[str, Any] = {"foreach": False}

_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw_torch": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, **_ADAM, **_PLAIN),
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr=lr, **_PLAIN),
    "adagrad": lambda groups, lr: torch.optim.Adagrad(groups, lr=lr, **_PLAIN),
    "rmsprop": lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, **_PLAIN),
    "adafactor": lambda groups, lr: Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False),
    MUON: lambda groups, lr, matrices: MuonAndAdamW(groups, lr=lr, matrices=matrices, **_ADAM, **_PLAIN),
}


def plain_updates(
    optimizer: str,
    weights: Sequence[Tensors],
    gradients: Sequence[Tensors],
    decaying: Collection[str],
    matrices: Collection[str] = (),
) -> list[dict[str, torch.Tensor]]:
    """The update of each step, of its ``weights`` before it and its ``gradients``; what is ``decaying`` decays, and
    ``matrices`` are Muon's, where it is the optimizer."""
    own = {name: torch.nn.Parameter(values.clone()) for name, values in weights[0].items()}
    kinds = {WEIGHT_DECAY: own.keys() & {*decaying}, 0.0: own.keys() - {*decaying}}
    groups = [{"params": [own[name] for name in own if name in of], "weight_decay": d} for d, of in kinds.items() if of]
    of_muon = {"matrices": {own[name] for name in matrices}} if optimizer == MUON else {}
    plain = _OPTIMIZERS[optimizer](groups, LEARNING_RATE, **of_muon)
    updates = []
    for before, given in zip(weights, gradients, strict=True):
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(before[name])
        for name, parameter in own.items():
            parameter.grad = given[name].clone() if name in given else None
        plain.step()
        updates.append({name: parameter.detach() - before[name] for name, parameter in own.items()})
    return updates


# What is kept of a training fills no more of a device than this; else the host keeps it.
_MOST_KEPT_BYTES = 2 * GIB


@dataclass
class SmallSteps:
    """Each step's doing, as this rank saw it; tensors are whole ones in double precision."""

    device: torch.device = _HOST
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
    matrices: frozenset[str] = frozenset()
    product_types: dict[str, str] = field(default_factory=dict)
    """In which type each linear layer's products came out, by its name."""

    def product(self, name: str, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self.product_types[name] = str(output.dtype).removeprefix("torch.")

    @staticmethod
    def clip_factor(norm: float) -> float:
        """What a gradient of this ``norm`` is multiplied by where it is clipped."""
        return min(1.0, LONGEST_GRADIENT / (norm + 1e-6))


class SmallTrainer(Trainer):
    def __init__(self, *args: Any, seen: SmallSteps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen, self._inner, self._losses = seen, kwargs["model"], list[torch.Tensor]()

    # In the order of the indices, as what is measured.
    _get_train_sampler = WatchedTrainer._get_train_sampler  # noqa: SLF001

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if hasattr(model, "zero_optimization_stage") and "step" not in vars(model):
            model.step = partial(self._step, model, model.step)
        loss = super().training_step(model, *args, **kwargs)
        self._losses.append(loss.detach())
        if self.accelerator.sync_gradients:
            self._seen.losses.append(float(sum(self._losses)))
            self._losses.clear()
        if len(self._seen.gradients) < len(self._seen.losses):
            scaler, found = getattr(self.accelerator, "scaler", None), gradients_of(self._inner, self._seen.device)
            scale = 1.0 if scaler is None else float(scaler.get_scale())
            self._seen.gradients.append({name: one / scale for name, one in found.items()})
        return loss

    def _step(self, engine: Any, step: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's: a part of the backward pass, which clips where nobody sees it, by the norm that it tells."""
        self._seen.gradients.append(found := gradients_of(self._inner, self._seen.device))
        step(*args, **kwargs)
        factor = self._seen.clip_factor(float(engine.get_global_grad_norm()))
        self._seen.clipped.append({name: one * factor for name, one in found.items()})


@dataclass(eq=False)
class _Watch(TrainerCallback):
    model: nn.Module
    seen: SmallSteps

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.seen.weights.append(whole(self.model, self.seen.device))

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if len(self.seen.clipped) < len(self.seen.gradients):
            self.seen.clipped.append(gradients_of(self.model, self.seen.device))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        before, after = self.seen.weights[-1], whole(self.model, self.seen.device)
        self.seen.updates.append({name: after[name] - before[name] for name in after})


def whole(model: nn.Module, device: torch.device = _HOST) -> dict[str, torch.Tensor]:
    """What it trains in double precision on ``device``, gathered from whoever holds parts of it."""
    named = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    return {plain_name(name): _kept(_at_deepspeed(one, "safe_get_full_fp32_param", one), device) for name, one in named}


def _at_deepspeed(parameter: nn.Parameter, name: str, otherwise: torch.Tensor | None) -> Any:
    """What its function of that name finds on all ranks, where it keeps more of ``parameter`` elsewhere."""
    if not (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
        return otherwise
    return getattr(import_module("deepspeed.utils"), name)(parameter)


def gradients_of(model: nn.Module, device: torch.device = _HOST) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    found = {plain_name(name): _at_deepspeed(each, "safe_get_full_grad", each.grad) for name, each in named}
    return {name: _kept(gradient, device) for name, gradient in found.items() if gradient is not None}


def _kept(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.to(device=device, dtype=torch.float64, copy=True)


def place_for(num_parameters: int, steps: int, device: torch.device) -> torch.device:
    """Where weights, updates, and gradients before and after clipping are kept."""
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
    """Return what the steps of ``spec``, small already, did with a model of ``config``. ``is_plain``: of experts each
    computes by itself. ``double``: in double precision. ``gathered``: with copies of its weights in that type."""
    torch.compiler.reset()
    set_seed(spec.seed)
    arguments = training_arguments(spec, folder, device, spec.steps)
    arguments.learning_rate, arguments.weight_decay = LEARNING_RATE, WEIGHT_DECAY
    arguments.max_grad_norm = LONGEST_GRADIENT
    if arguments.deepspeed:  # which has filled in its own already
        arguments.hf_deepspeed_config.config["gradient_clipping"] = LONGEST_GRADIENT
    with DoublePrecision() if double else nullcontext():
        model = build_model(spec, config, device)
        if is_plain:
            model.config._experts_implementation = "eager"  # noqa: SLF001 - as transformers' own loading sets it
        set_initial_weights(model, spec.seed)
        if double:
            model.double()
        if gathered != "no":
            as_gathered(model, DTYPES[gathered])
        prepare_layers(spec, model)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        seen = SmallSteps(device=place_for(num_parameters, spec.steps, device))
        if not spec.torch_compile:  # a look from inside would change what is compiled
            for name, module in model.named_modules():
                if isinstance(module, (nn.Linear, Conv1D)):
                    module.register_forward_hook(partial(seen.product, plain_name(name)))
        size, length = model.config.get_text_config().vocab_size, SEQUENCES * (spec.steps + 1)
        rows = UnevenRows(length=length, sequence_length=spec.sequence_length, vocabulary_size=size, seed=spec.seed)
        given = {"train_dataset": rows, "callbacks": [_Watch(model, seen)]}
        trainer = trainer_of(SmallTrainer, spec, model, arguments, seen=seen, **given)
        seen.decaying = frozenset(map(plain_name, trainer.get_decay_parameter_names(model)))
        seen.matrices = frozenset(map(plain_name, hidden_matrices(model)))
        try:
            trainer.train()
        except Exception as error:
            raise explained(trainer, spec, error) from error
    return seen
