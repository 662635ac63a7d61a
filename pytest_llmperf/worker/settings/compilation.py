"""Compilation: torch.compile of the model or of each layer, and what its compiler did. Recomputation of activations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.utils as dynamo
from torch import nn
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from pytest_llmperf.observe.device import is_gpu
from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.compilation import CompilationEvidence, OffloadingEvidence, RecomputationEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def arguments(spec: TrainSpec, _device: torch.device) -> Mapping[str, Any]:
    is_whole = spec.torch_compile_scope == "model"
    return {
        **_recomputation(spec),
        "torch_compile": spec.torch_compile and is_whole,
        "torch_compile_mode": spec.torch_compile_mode if spec.torch_compile_mode != "default" and is_whole else None,
    }


def prepare_layers(spec: TrainSpec, model: PreTrainedModel) -> None:
    """Offload activations, or compile each repeated layer in place, by PyTorch's recipe of regional compilation."""
    if spec.offloading != "no":
        offload(model)
    if not spec.torch_compile or spec.torch_compile_scope != "layers":
        return
    repeated = set(model._no_split_modules or ())  # noqa: SLF001 - transformers' one list of them
    if not (layers := [module for module in model.modules() if type(module).__name__ in repeated]):
        line = f"{type(model).__name__} names no repeated layers to compile: use torch_compile_scope='model'"
        raise RefusedError(line)
    for layer in layers:
        layer.compile(mode=spec.torch_compile_mode)


def seen_compilation(model: nn.Module | None) -> CompilationEvidence:
    """What of ``model`` is compiled, and what the compiler of this process has done."""
    modules = list(model.modules()) if model is not None else []
    # Not by truth: a compiled model answers that by a length, which it has none of.
    compiled = [module for module in modules if _compiled(module) is not None]
    is_whole, mode, captured = any(hasattr(module, "_orig_mod") for module in modules), "", None
    if compiled:
        options = _compiled(compiled[0]).get_compiler_config() or {}  # torch.compile makes them of its mode
        autotune = bool(options.get("max_autotune")) and bool(options.get("coordinate_descent_tuning"))
        mode = _MODES[autotune, bool(options.get("triton.cudagraphs"))]
        captured = _captured(next(modules[0].parameters()).device) if options.get("triton.cudagraphs") else None
    return CompilationEvidence(
        torch_compile=len(compiled) > 0,
        torch_compile_mode=mode,
        torch_compile_scope="model" if is_whole else "layers" if compiled else "",
        compiled_modules=sorted({type(getattr(module, "_orig_mod", module)).__name__ for module in compiled}),
        compiled_graphs=dict(dynamo.counters["stats"]).get("unique_graphs", 0),
        cuda_graphs=captured,
        graph_breaks=sum(dynamo.counters["graph_break"].values()),
        recompilations=sum(times - 1 for times in FRAME_COMPILE_COUNTER.values()),
    )


def _captured(device: torch.device) -> int:
    """How many CUDA graphs are replayed in the place of what was compiled; in their trees each follows another."""
    trees = importlib.import_module("torch._inductor.cudagraph_trees")  # a second, where nothing is compiled
    manager = trees.get_manager(device.index or 0, create_if_none_exists=False)
    nodes, number = [*chain.from_iterable(manager.roots.values())] if manager else [], 0
    while nodes:
        nodes += chain.from_iterable(nodes.pop().children.values())
        number += 1
    return number


def _compiled(module: nn.Module) -> Any:
    """What dynamo wrapped to run in the place of ``module``; ``None``: nothing, as under TORCHDYNAMO_DISABLE."""
    wrapped = module if hasattr(module, "_orig_mod") else module._compiled_call_impl
    return wrapped if hasattr(wrapped, "get_compiler_config") else None


# (autotuned, CUDA graphs) -> mode.
_MODES = {
    (False, False): "default",
    (False, True): "reduce-overhead",
    (True, True): "max-autotune",
    (True, False): "max-autotune-no-cudagraphs",
}

# Recomputation: what the layers' checkpoint function keeps, and whether it is there.


def _recomputation(spec: TrainSpec) -> Mapping[str, Any]:
    if not spec.gradient_checkpointing:
        return {}
    from transformers import TrainingArguments  # noqa: PLC0415 - a script may have no transformers

    # transformers 5.23 renames the argument and warns of the old name; 5.17 has only the old one.
    known = {field.name for field in fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if spec.checkpointing_policy == "selective":
        if spec.attention == "flash_attention_2":
            importlib.import_module("flash_attn.flash_attn_interface")  # or its operator is not there yet to be named
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, list(kept_operators()))
    return {name: True, f"{name}_kwargs": kwargs}


def kept_operators() -> Iterator[Any]:
    """What is dear to compute again for the memory it takes: matrix products and fused attention."""
    for name in (
        "mm addmm bmm baddbmm _scaled_mm _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention"
    ).split():
        if (packet := getattr(torch.ops.aten, name, None)) is not None:
            yield packet.default
    if (flash := getattr(torch.ops.flash_attn, "_flash_attn_forward", None)) is not None:
        yield flash.default


def _seen_recomputation(training: Training) -> RecomputationEvidence:
    checkpointed = [each for each in training.model.modules() if getattr(each, "gradient_checkpointing", False)]
    functions = [getattr(each, "_gradient_checkpointing_func", None) for each in checkpointed]
    function = next(filter(None, functions), None)
    policy = "selective" if "context_fn" in getattr(function, "keywords", {}) else "full" if function else ""
    return RecomputationEvidence(gradient_checkpointing=len(checkpointed) > 0, checkpointing_policy=policy)


# Offloading: smaller ones are not worth a copy; and where the model has what its last forward pass moved.
_LEAST_BYTES, _MOVED = 2**20, "_llmperf_offloaded"


class Offloaded(saved_tensors_hooks):
    """A forward pass in here keeps its large activations in pinned memory; copies are of the stream that computes."""

    def __init__(self, model: nn.Module, least_bytes: int = _LEAST_BYTES, host: str = "cpu") -> None:
        super().__init__(self._to_host, self._back)
        # A product keeps its weights, which are there anyway.
        self._weights = {id(each.untyped_storage()) for each in model.parameters()}
        self._least_bytes, self._host, self.moved = least_bytes, host, 0

    def _to_host(self, tensor: torch.Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        if size < self._least_bytes or id(tensor.untyped_storage()) in self._weights:
            return tensor
        self.moved += size
        host = torch.empty(tensor.size(), dtype=tensor.dtype, device=self._host, pin_memory=is_gpu(tensor.device))
        return host.copy_(tensor, non_blocking=True), tensor.device

    def _back(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed[0].to(packed[1], non_blocking=True)


def offload(model: PreTrainedModel, host: str = "cpu") -> None:
    """By hooks: kernels that the Trainer swaps in later replace ``model.forward``."""
    running: list[Offloaded] = []

    def begin(*_: Any) -> None:
        running.append(Offloaded(model, host=host))
        running[-1].__enter__()

    def end(*_: Any) -> None:
        offloaded = running.pop()
        offloaded.__exit__(None, None, None)
        setattr(model, _MOVED, offloaded.moved)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


WITNESSES = {
    "offloading": lambda _, model: lambda __: OffloadingEvidence(offloaded_bytes=getattr(model, _MOVED, None)),
    "compilation": lambda *_: lambda training: seen_compilation(training.wrapped),
    "recomputation": lambda *_: _seen_recomputation,
}
