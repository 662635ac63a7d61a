"""Loss: a forward pass that never holds all logits, in the place of the model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.loss import LossEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Witness

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of a step's tokens, so many parts; and what of a configuration its own loss computes beside them.
_PARTS, _LEFT_OUT = 8, -100
_MORE = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_router_logits")
_RAN = "_llmperf_loss"


def replace_loss(spec: TrainSpec, model: PreTrainedModel) -> None:
    """Let a forward pass that is given labels return ``spec.loss`` alone, without logits."""
    if spec.loss == "model":
        return
    more = [name for name in _MORE if getattr(model.config, name, None)]
    head = model.get_output_embeddings()
    if more or not isinstance(head, nn.Linear) or model.base_model is model:
        why = f"its configuration's {more[0]} has a part in it" if more else "it is no linear layer on the last states"
        raise RefusedError(f"{model.config.model_type} has no loss={spec.loss!r}: {why}; use loss='model'")
    own, summed = model.forward, _chunked if spec.loss == "chunked" else _cut()

    @wraps(own)  # the Trainer reads its arguments
    def forward(*args: Any, labels: torch.Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        if labels is None:
            return own(*args, **kwargs)
        from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: PLC0415 - a script may have none

        setattr(model, _RAN, spec.loss)
        states = model.base_model(*args, **kwargs).last_hidden_state[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        number = (targets != _LEFT_OUT).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutputWithPast(loss=summed(head, states, targets) / number)

    model.forward = forward


def _chunked(head: nn.Module, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    def part(own: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(own).float(), following, reduction="sum")

    pairs = zip(states.chunk(_PARTS), targets.chunk(_PARTS), strict=True)
    return torch.stack([checkpoint(part, own, following, use_reentrant=False) for own, following in pairs]).sum()


def _cut() -> Callable[..., torch.Tensor]:
    from cut_cross_entropy import linear_cross_entropy  # noqa: PLC0415 - only this loss needs the package

    def summed(head: Any, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        return linear_cross_entropy(states.to(dtype), head.weight.to(dtype), targets, reduction="sum")

    return summed


# Of the last forward pass that was given labels.
WITNESSES: Mapping[str, Witness] = {
    "loss": lambda *_: lambda training: LossEvidence(loss=getattr(training.model, _RAN, None))
}
PREPARE = replace_loss
