"""The future: whether what a model says of a position depends on what comes after it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from pytest_llmperf.worker.evidence import is_sharded

# A window of attention or a kernel's block is longer than half of it at times; more would only cost memory.
_LENGTH = 128


def seen_future(trainer: Trainer, model: PreTrainedModel) -> float | None:
    """By how much other tokens in the second half of a sequence change the logits of its first half.

    As a share of the largest change that they make in the second half. ``None`` where that was not tried:
    flex_attention would compile once more, and of a sharded model all ranks must gather the weights; or where it does
    not go through, for want of memory for instance.
    """
    if model.config._attn_implementation == "flex_attention" or is_sharded(model):
        return None
    tokens = trainer.train_dataset[0]["input_ids"][:_LENGTH].unsqueeze(0).to(model.device)
    half = tokens.shape[1] // 2
    if half == 0:
        return None
    other = tokens.clone()
    other[:, half:] = (other[:, half:] + 1) % model.config.get_text_config().vocab_size
    is_training = model.training
    try:
        # Without dropout; and as it is written, since a compiled one would be compiled once more for this length.
        model.eval()
        with torch.no_grad(), trainer.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            change = (_logits(model, tokens) - _logits(model, other)).abs()
        before, after = float(change[:, :half].max()), float(change[:, half:].max())
    except Exception:  # noqa: BLE001 - whatever stands in the way, the measurement is done and counts
        return None
    finally:
        model.train(is_training)
    return before / after if after > 0 else None


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens).logits
    return logits.float()
