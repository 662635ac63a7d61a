"""What was really active in a launch, read off the objects that trained and not off the request."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.utils as dynamo
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Trainer

from pytest_llmperf.worker import inject


class LigerNotes(logging.Handler):
    """Keeps what Liger says when it patches nothing: one INFO line is all it gives."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("liger_kernel.transformers.monkey_patch")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class AutocastWitness:
    """Notes the autocast type the first time the model's embedding runs, then goes away."""

    def __init__(self, model: PreTrainedModel, device_type: str) -> None:
        self.dtype: str | None = None
        self._device_type = device_type
        # The embedding and not the model: autocast wraps the model's forward, so it is not yet on before it.
        self._hook = model.get_input_embeddings().register_forward_pre_hook(self._look)

    def _look(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_autocast_enabled(self._device_type):
            self.dtype = str(torch.get_autocast_dtype(self._device_type))
        self._hook.remove()


def parameter_dtypes(model: nn.Module) -> dict[str, int]:
    """Parameters by type, as they were before anything wrapped the model."""
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        counts[str(parameter.dtype)] = counts.get(str(parameter.dtype), 0) + parameter.numel()
    return counts


def collect(trainer: Trainer, model: PreTrainedModel, autocast: AutocastWitness, liger: LigerNotes) -> dict[str, Any]:
    """Everything ``judge/validity.py`` holds against the spec; called once, after training."""
    optimizer = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    device = next(model.parameters()).device
    return {
        "device_type": device.type,
        "world_size": trainer.args.world_size,
        "attention": str(model.config._attn_implementation),
        "parameter_dtypes": parameter_dtypes(model),
        "autocast_dtype": autocast.dtype,
        "tf32": _tf32_rounds(device),
        "liger_modules": _liger_modules(model),
        "liger_note": liger.lines[-1] if liger.lines else "",
        "optimizer": type(optimizer).__name__,
        "optimizer_fused": bool(optimizer.defaults.get("fused")) if optimizer is not None else False,
        **_optimizer_states(optimizer),
        "gradient_checkpointing": any(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
        "torch_compile": _is_compiled(trainer.model_wrapped),
        "compiled_graphs": dict(dynamo.counters["stats"]).get("unique_graphs", 0),
        "graph_breaks": sum(dynamo.counters["graph_break"].values()),
        "injected": os.environ.get(inject.VARIABLE, ""),
        "attention_kernel": _attention_kernel(trainer, model),
    }


def _optimizer_states(optimizer: Any) -> dict[str, Any]:
    """How it keeps its states, as bitsandbytes' optimizers tell; of others the class says it."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return {
        "optimizer_bits": "" if bits is None else f"{bits}bit",
        "optimizer_paged": bool(getattr(optimizer, "is_paged", False)),
    }


def merged(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's evidence; what other ranks saw differently is in ``other_ranks``, by name and then by rank."""
    worst = {name: of(seen[name] for seen in by_rank) for name, of in _COUNTS.items()}
    others = {
        name: {str(rank): seen[name] for rank, seen in enumerate(by_rank) if _differ(seen[name], value)}
        for name, value in by_rank[0].items()
        if name not in _COUNTS
    }
    others = {name: ranks for name, ranks in others.items() if ranks}
    return {**by_rank[0], **worst, **({"other_ranks": others} if others else {})}


# Ranks need not compile alike: the worst of them counts.
_COUNTS: Mapping[str, Callable[[Iterable[int]], int]] = {"compiled_graphs": min, "graph_breaks": max}


def _differ(a: object, b: object) -> bool:
    return a != b and "unknown" not in (a, b)


class _AttentionOps(TorchDispatchMode):
    """Collects the names of the attention operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if ("attention" in name or "flash" in name) and name not in self.names:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def _attention_kernel(trainer: Trainer, model: PreTrainedModel) -> str:
    """The attention operators that one more sequence calls, after all measurements; empty: plain matrix products.

    ``unknown`` where the sequence does not go through, for want of memory or because an operator cannot be watched;
    flex_attention is not tried, since it would compile once more for a batch of one.
    """
    if model.config._attn_implementation == "flex_attention":
        return "unknown"
    batch = trainer.train_dataset[0]
    inputs = {name: value.unsqueeze(0).to(model.device) for name, value in batch.items()}
    try:
        with trainer.accelerator.autocast(), _AttentionOps() as seen:
            model(**inputs)
    except Exception:  # noqa: BLE001 - whatever stands in the way, the measurement is done and counts
        return "unknown"
    return " ".join(seen.names)


def _liger_modules(model: nn.Module) -> int:
    """Modules whose forward pass is one of Liger's."""

    def is_patched(module: nn.Module) -> bool:
        forward = getattr(module.forward, "__func__", module.forward)
        forward = getattr(forward, "__wrapped__", forward)
        return "liger_kernel" in (getattr(forward, "__module__", "") or "") or "liger_kernel" in type(module).__module__

    return sum(is_patched(module) for module in model.modules())


def _is_compiled(model: nn.Module | None) -> bool:
    modules = model.modules() if model is not None else iter(())
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules)


def _tf32_rounds(device: torch.device) -> bool:
    """Whether an fp32 matrix product on this device loses the bits that TF32 drops (it keeps 10 of 23)."""
    if device.type != "cuda":
        return False
    finer_than_tf32 = 1 + 2.0**-13
    matrix = torch.full((256, 256), finer_than_tf32, device=device)
    product = matrix @ torch.eye(256, device=device)
    return bool((product != matrix).any().item())
