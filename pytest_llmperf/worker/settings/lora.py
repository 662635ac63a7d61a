"""LoRA: PEFT's adapters in a model's linear layers, over weights as they are or in bitsandbytes' four bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pytest_llmperf.observe.device import give_back
from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.lora import BASES, LoraEvidence, targets
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training
from pytest_llmperf.worker.settings.precision import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A block of so many weights has a scale of one byte, and so many scales have one of four.
_BLOCK, _SCALES = 64, 256


def attach(spec: TrainSpec, model: PreTrainedModel, to_nf4: Callable[[nn.Linear], nn.Module] | None = None) -> None:
    """Give ``model`` adapters in the spec's precision, all that is trained from then on."""
    if not spec.lora:
        return
    # Imported here: only LoRA needs the package.
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415

    if spec.lora_base == "nf4":
        quantise(model, to_nf4 or _quantised)
    # The factor is no cost: twice the rank, as many choose it.
    config = LoraConfig(
        r=spec.lora_rank, lora_alpha=2 * spec.lora_rank, target_modules=targets(spec), lora_dropout=spec.lora_dropout
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[spec.model_precision])  # beside four bits PEFT leaves adapters in the default
    try:
        # What ``add_adapter`` does, which in transformers 5.24 refuses each PEFT that there is.
        model._hf_peft_config_loaded = True  # noqa: SLF001
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise RefusedError(f"lora_targets={spec.lora_targets!r}: {' '.join(str(error).split())[:200]}") from error
    finally:
        torch.set_default_dtype(usual)


def quantise(model: PreTrainedModel, to_nf4: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace each linear layer but the vocabulary's, one after the other: no two copies of all are there at once."""
    head, device = model.get_output_embeddings(), model.device
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear and module is not head:
                setattr(parent, name, to_nf4(module))
    model.is_loaded_in_4bit = True  # by which PEFT and transformers know it
    give_back(device)


def _quantised(linear: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit  # noqa: PLC0415 - only four bits need the package

    made = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=linear.weight.dtype,
        quant_type="nf4",
        device="meta",
    )
    made.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=made)
    made.bias = linear.bias
    return made.to(linear.weight.device)


class _Dequantising(torch.autograd.Function):
    """A product with weights that are made of their four bits for it, and for its backward pass once more."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ctx.shape = shape
        return nn.functional.linear(rows, rows.new_empty(shape))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ gradients[0].new_empty(ctx.shape), None


class CountedNf4(nn.Linear):
    """Has the sizes of a layer in four bits, for tensors that have no content."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        number, self._shape = linear.weight.numel(), linear.weight.shape
        blocks = -(-number // _BLOCK)
        self.weight = nn.Parameter(torch.empty(-(-number // 2), 1, dtype=torch.uint8), requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8))
        for name, size in (("scales_of_scales", -(-blocks // _SCALES)), ("code", 16), ("offset", 1)):
            self.register_buffer(name, torch.empty(size))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made = _Dequantising.apply(rows, self._shape)
        return made if self.bias is None else made + self.bias


def _seen(spec: TrainSpec, training: Training) -> LoraEvidence:
    named = dict(training.model.named_modules())
    adapted = {name: each for name, each in named.items() if hasattr(each, "lora_A") and "base_layer" not in name}
    if not adapted:
        return LoraEvidence(lora={"targets": []} if spec.lora else None)
    inside, head = tuple(f"{name}." for name in adapted), training.model.get_output_embeddings()
    linear = [
        name
        for name, module in named.items()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not name.startswith(inside)
    ]
    first = next(iter(adapted.values()))
    weights = (getattr(module.base_layer, "weight", None) for module in adapted.values())  # none of experts together
    trained = {name: p.numel() for name, p in training.model.named_parameters() if p.requires_grad}
    return LoraEvidence(
        lora={
            "targets": sorted({name.rpartition(".")[2] for name in adapted}),
            "left": len({*linear} - {*adapted}),
            "rank": next(iter(first.r.values())),
            "dropout": float(getattr(next(iter(first.lora_dropout.values())), "p", 0.0)),
            "base": " ".join(sorted({getattr(weight, "quant_type", BASES[0]) for weight in weights})),
            "trained": sum(trained.values()),
            "adapters": sum(number for name, number in trained.items() if ".lora_" in name),
        }
    )


WITNESSES = {"lora": lambda spec, _model: partial(_seen, spec)}
PREPARE = attach
