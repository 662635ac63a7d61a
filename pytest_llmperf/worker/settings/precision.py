"""Precision: the types of weights, autocast, TF32 and torchao's fp8, and which of them a training had."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pytest_llmperf.observe.device import allow_tf32, is_gpu
from pytest_llmperf.observe.environment import numel
from pytest_llmperf.settings.precision import FP8_MULTIPLE, FP8_RECIPES, GATHERED, PrecisionEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training
from pytest_llmperf.worker.settings.parallelism import zero_masters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def arguments(spec: TrainSpec, device: torch.device) -> Mapping[str, Any]:
    return {
        "bf16": spec.mixed_precision == "bf16",
        "fp16": spec.mixed_precision == "fp16",
        "tf32": spec.tf32 if is_gpu(device) else None,
    }


def to_fp8(spec: TrainSpec, model: PreTrainedModel) -> None:
    """Let the linear layers multiply in float8, but for the vocabulary's, whose products the loss is sensitive to."""
    if spec.fp8 in ("no", GATHERED):
        return
    # Imported here: only fp8 needs the package.
    from torchao.float8 import convert_to_float8_training  # noqa: PLC0415

    convert_to_float8_training(model, config=fp8_config(spec.fp8), module_filter_fn=_takes_fp8(model))


def fp8_config(recipe: str) -> Any:
    from torchao.float8 import Float8LinearConfig  # noqa: PLC0415 - as above

    if recipe == GATHERED:
        return Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return Float8LinearConfig.from_recipe_name(recipe)


def _takes_fp8(model: PreTrainedModel) -> Callable[[nn.Module, str], bool]:
    head = model.get_output_embeddings()
    # The matrix units take operands in rows of so many bytes.
    return lambda module, _name: (
        isinstance(module, nn.Linear)
        and module is not head
        and module.in_features % FP8_MULTIPLE == module.out_features % FP8_MULTIPLE == 0
    )


def force_tf32(spec: TrainSpec, device: torch.device) -> None:
    """As the spec says: accelerate switches it on for compiled fp32 training."""
    if is_gpu(device):
        allow_tf32(spec.tf32)


def gather_fp8(spec: TrainSpec, model: PreTrainedModel, trainer: Trainer) -> None:
    """Have accelerate convert what is gathered in fp8: once the optimizer is made, since it finds weights by storages,
    which torchao's tensors hide. After each update it computes all scales at once."""
    if spec.fp8 == GATHERED:
        from accelerate.utils import AORecipeKwargs  # noqa: PLC0415 - a script may have no accelerate

        recipe = AORecipeKwargs(config=fp8_config(spec.fp8), module_filter_func=_takes_fp8(model))
        trainer.accelerator.ao_recipe_handler, trainer.accelerator.has_fp8_handler = recipe, True


class Witness:
    """Notes the autocast type the first time the model's embedding runs; the rest is seen at the end."""

    def __init__(self, spec: TrainSpec, model: PreTrainedModel) -> None:
        self._asked, self._device_type, self._autocast = DTYPES[spec.model_precision], model.device.type, ""
        # The embedding and not the model: autocast wraps the model's forward, so it is not yet on before it.
        self._hook = model.get_input_embeddings().register_forward_pre_hook(self._look)

    def _look(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_autocast_enabled(self._device_type):
            self._autocast = str(torch.get_autocast_dtype(self._device_type))
        self._hook.remove()

    def __call__(self, training: Training) -> PrecisionEvidence:
        masters = zero_masters(training.wrapped)
        converted, left, recipe = fp8_layers(training.model)
        return PrecisionEvidence(
            parameter_dtypes=parameter_dtypes(training.model, masters),
            kept_dtypes={} if masters else kept_dtypes(training.model, self._asked),
            autocast_dtype=self._autocast,
            tf32=_tf32_rounds(training.device),
            fp8_modules=converted,
            linear_modules=left,
            fp8_recipe=recipe,
            fp8_gathered=gathered_in_fp8(training.model) if converted else None,
            loss_scaling=getattr(training.trainer.accelerator, "scaler", None) is not None,
        )


def parameter_dtypes(model: nn.Module, masters: Sequence[torch.Tensor] = ()) -> dict[str, int]:
    """Parameters by type, as they were before anything wrapped the model; ``masters`` are updated in their place."""
    counts = Counter[str]()
    for parameter in masters or model.parameters():
        counts[str(parameter.dtype)] += numel(parameter)
    return dict(counts)


def kept_dtypes(model: PreTrainedModel, asked: torch.dtype) -> dict[str, int]:
    """Elements of the parameters that the model's own class makes in another type than ``asked``, by type. Routers,
    gates and decay rates of a dozen families stay in fp32 on purpose, as they do in a twin without storage."""
    if not (other := {name: p for name, p in model.named_parameters() if p.dtype != asked}):
        return {}
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - a script may have no transformers

    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(deepcopy(model.config), dtype=asked)
    listed = (getattr(model, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    patterns = [pattern for patterns in listed for pattern in patterns or ()]
    made = {name: p.dtype for name, p in twin.named_parameters()}
    kept = Counter[str]()
    for name, p in other.items():
        if type(p).__name__ == "Params4bit":  # LoRA's evidence tells of them
            kept[str(p.dtype)] += p.numel()
            continue
        is_named = p.dtype == torch.float32 and any(re.search(rf"(^|\.){each}($|\.)", name) for each in patterns)
        if is_named or p.dtype == made.get(name):
            kept[str(p.dtype)] += p.numel()
    return dict(kept)


def fp8_layers(model: nn.Module) -> tuple[int, int, str]:
    """How many linear layers multiply in fp8, how many do not, and by which of torchao's recipes."""
    kinds = [type(module).__name__ for module in model.modules()]
    converted = next((module for module in model.modules() if type(module).__name__ == "Float8Linear"), None)
    recipe = ""
    if converted is not None:
        recipe = next((name for name in FP8_RECIPES[1:] if fp8_config(name) == converted.config), "another")
    return kinds.count("Float8Linear"), kinds.count("Linear"), recipe


def gathered_in_fp8(model: nn.Module) -> int:
    """Of how many weights FSDP's copies came over in float8: it keeps what it gathered into, without its storage."""
    weights = set()
    for module in (each for each in model.modules() if isinstance(each, FSDPModule)):
        state = module._get_fsdp_state()  # noqa: SLF001 - told nowhere else
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:  # noqa: SLF001
            weights |= {*group.fsdp_params} if group else set()
    kinds = ({str(copy.dtype) for copy in each.all_gather_outputs} for each in weights)
    return sum(bool(names) and all(name.startswith("torch.float8") for name in names) for names in kinds)


def _tf32_rounds(device: torch.device) -> bool:
    """Whether an fp32 matrix product on this device loses the bits that TF32 drops (it keeps 10 of 23)."""
    if not is_gpu(device):
        return False
    finer_than_tf32 = 1 + 2.0**-13
    matrix = torch.full((256, 256), finer_than_tf32, device=device)
    product = matrix @ torch.eye(256, device=device)
    return bool((product != matrix).any().item())


WITNESSES = {"precision": Witness}
PREPARE = to_fp8
