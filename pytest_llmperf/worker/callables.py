"""Callables: whose code runs in a step, read off the functions that run and not off the names that they go by.

A decorator that was written well takes over the name and the module of what it wraps, and hides behind them; the
module whose globals its code sees cannot be taken over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer

# Deeper chains of decorators are none that anybody wrote.
_DEEPEST = 20

# What a step calls by its name, beside the modules' forward passes.
_OF_A_STEP: dict[str, tuple[Any, tuple[str, ...]]] = {
    "Trainer": (Trainer, ("training_step", "compute_loss", "_prepare_inputs", "_inner_training_loop")),
    "Accelerator": (Accelerator, ("backward", "clip_grad_norm_", "autocast")),
    "Tensor": (torch.Tensor, ("backward",)),
    "autograd": (torch.autograd, ("backward",)),
    "functional": (
        nn.functional,
        (
            "scaled_dot_product_attention",
            "cross_entropy",
            "linear",
            "embedding",
            "dropout",
            "silu",
            "gelu",
            "softmax",
            "layer_norm",
            "rms_norm",
        ),
    ),
}


def of_a_step(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """By what is called: the modules that define it, the outermost first; of forward passes where there are several."""
    found = {
        f"{name}.{function}": " > ".join(defining(getattr(owner, function, None)))
        for name, (owner, functions) in _OF_A_STEP.items()
        for function in functions
    }
    found["Optimizer.step"] = " > ".join(defining(getattr(type(optimizer), "step", None)))
    for module in model.modules():
        chain = list(defining(module.forward))
        if len(chain) > 1:
            found[f"{type(module).__name__}.forward"] = " > ".join(chain)
    return dict(sorted(found.items()))


def defining(function: Any) -> Iterator[str]:
    """The module that defines ``function``, and those of what it wraps in turn; ``built in`` for what has no code."""
    for _ in range(_DEEPEST):
        function = getattr(function, "__func__", function)  # a method's
        yield getattr(function, "__globals__", {}).get("__name__", "built in")
        inner = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if inner is None:
            return
        function = inner
