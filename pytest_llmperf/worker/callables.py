"""Callables: whose code runs in a step, read off the functions that run and not off the names that they go by.

A decorator that was written well takes over the name and the module of what it wraps, and hides behind them; the
module whose globals its code sees cannot be taken over.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer
from transformers.integrations import hub_kernels

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


# Whose functions and classes are there in any environment that trains.
_ALWAYS_THERE = frozenset({"torch", "transformers", "huggingface_hub", "pytest_llmperf"}) | sys.stdlib_module_names


def optional_functions(model: nn.Module) -> dict[str, str]:
    """By name, the packages whose code runs for what transformers has a fall-back of: ``causal_conv1d_fn: fla``.

    A modeling module has them as functions that wrap the package's own or its fall-back, as names that are imported or
    ``None``, as flags (``is_fast_path_available``), and modules keep some as attributes.
    """
    found: dict[str, str] = {}
    owners = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}  # FSDP makes classes anew
    for owner in sorted(name for name in owners if not _OF_ALL_MODELS.match(name)):
        for name, value in vars(sys.modules.get(owner, ModuleType(owner))).items():
            if not name.startswith("_") and name != "TYPE_CHECKING":
                found.setdefault(name, _provider(value))
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if isinstance(value, _FUNCTIONS)}
        found |= {f"{type(module).__name__}.{name}": _provider(value) for name, value in own.items() if name[0] != "_"}
    kernels = getattr(hub_kernels, "_KERNEL_MODULE_MAPPING", {})
    found |= {f"kernel {name}": getattr(kernel, "__name__", "none") for name, kernel in kernels.items()}
    return {name: provider for name, provider in sorted(found.items()) if provider}


# Modules that say nothing of one family.
_OF_ALL_MODELS = re.compile(r"builtins|torch\b|transformers\.(?!models\.)")
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


def _provider(value: Any) -> str:
    """Whose code ``value`` runs; empty of what has no fall-back."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (*_FUNCTIONS, type)):
        return ""
    reached = list(_reached(value, 0))
    packages = {name.partition(".")[0] for name in reached}
    others = sorted(packages - _ALWAYS_THERE)
    # What wraps another function has chosen one.
    return " + ".join(others) or ("transformers" if len(reached) > 1 and "transformers" in packages else "")


def _reached(value: Any, depth: int) -> Iterator[str]:
    """The module of ``value``, and of each function that it wraps, keeps in its closure or was made of."""
    yield getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None) or "builtins"
    if depth < _DEEPEST and isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty one
                if isinstance(cell.cell_contents, _FUNCTIONS) or hasattr(cell.cell_contents, "func"):
                    yield from _reached(cell.cell_contents, depth + 1)
