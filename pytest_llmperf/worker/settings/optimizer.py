"""Optimizers: the one that transformers has no name for, and what one says of itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.optimizer import MUON, OptimizerEvidence
from pytest_llmperf.settings.train_spec import TrainSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon of ``matrices``, AdamW of the rest, with one learning rate: Muon's updates are made as large as AdamW's."""

    def __init__(self, params: Any, *, lr: float, matrices: Collection[nn.Parameter], **adam: Any) -> None:
        kinds: tuple[list[Any], list[Any]] = [], []
        for group in params if params and isinstance(params[0], dict) else [{"params": params}]:
            for is_matrix, kind in zip((True, False), kinds, strict=True):
                if own := [each for each in group["params"] if (each in matrices) == is_matrix]:
                    kind.append({**group, "params": own})
        muon, rest = kinds
        self._parts = [torch.optim.Muon(muon, lr=lr, adjust_lr_fn="match_rms_adamw")] if muon else []
        self._parts += [torch.optim.AdamW(rest, lr=lr, **adam)] if rest else []
        # A schedule changes a group's rate where its part reads it, and all states are stored as one optimizer's.
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name what Muon is for: what it trains of two dimensions, but for embeddings and the vocabulary's product."""
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    others = {parameter for each in (*tables, *([head] if head is not None else [])) for parameter in each.parameters()}
    named = {name: each for name, each in model.named_parameters() if each.requires_grad and each not in others}
    return {name: each for name, each in named.items() if each.ndim == 2}  # noqa: PLR2004 - a matrix


def muon_matrices(spec: TrainSpec, model: nn.Module) -> list[nn.Parameter]:
    """Nothing where another optimizer trains."""
    return [*hidden_matrices(model).values()] if spec.optimizer == MUON else []


def arguments(spec: TrainSpec, _device: torch.device) -> Mapping[str, Any]:
    return {"optim": "adamw_torch" if spec.optimizer == MUON else spec.optimizer}


def chosen(spec: TrainSpec, model: PreTrainedModel, args: TrainingArguments) -> Mapping[str, Any]:
    """What a Trainer is given beside the name of its optimizer."""
    if spec.optimizer != MUON:
        return {}
    if not hasattr(torch.optim, "Muon"):
        raise RefusedError(f"torch {torch.__version__} has no torch.optim.Muon, expected 2.9 or newer; update torch")
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    given = {"lr": args.learning_rate, "matrices": {*muon_matrices(spec, model)}, **adam}
    return {"optimizer_cls_and_kwargs": (MuonAndAdamW, given)}


def seen_optimizer(optimizer: Any) -> OptimizerEvidence:
    """As it says of itself; bitsandbytes' tell of their states, of others the class says it."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return OptimizerEvidence(
        optimizer=type(optimizer).__name__,
        optimizer_fused=optimizer is not None and bool(optimizer.defaults.get("fused")),
        optimizer_bits="" if bits is None else f"{bits}bit",
        optimizer_paged=bool(getattr(optimizer, "is_paged", False)),
    )


WITNESSES = {"optimizer": lambda *_: lambda training: seen_optimizer(training.optimizer)}
