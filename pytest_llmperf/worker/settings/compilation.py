"""Compilation: torch.compile of the model or of each layer, and what its compiler did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch._dynamo.utils as dynamo
from torch import nn
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

from pytest_llmperf.settings.compilation import CompilationEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.refusal import RefusedError
from pytest_llmperf.worker.settings import Training

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def arguments(spec: TrainSpec) -> Mapping[str, Any]:
    is_whole = spec.torch_compile_scope == "model"
    return {
        "torch_compile": spec.torch_compile and is_whole,
        "torch_compile_mode": spec.torch_compile_mode if spec.torch_compile_mode != "default" and is_whole else None,
    }


def compile_layers(spec: TrainSpec, model: PreTrainedModel) -> None:
    """Compile each repeated layer in place; they share their code, so that the first one's graphs serve all.

    Source: PyTorch's recipe of regional compilation.
    """
    if not spec.torch_compile or spec.torch_compile_scope != "layers":
        return
    repeated = set(model._no_split_modules or ())  # noqa: SLF001 - transformers' one list of them
    layers = [module for module in model.modules() if type(module).__name__ in repeated]
    if not layers:
        raise RefusedError(
            f"{type(model).__name__} names no repeated layers to compile: use torch_compile_scope='model'"
        )
    for layer in layers:
        layer.compile(mode=spec.torch_compile_mode)


def witness(training: Training) -> CompilationEvidence:
    """Of the model as the Trainer wraps it."""
    return seen_compilation(training.wrapped)


def seen_compilation(model: nn.Module | None) -> CompilationEvidence:
    """What of ``model`` is compiled, and what the compiler of this process has done."""
    modules = list(model.modules()) if model is not None else []
    # Not by truth: a compiled model answers that by a length, which it has none of.
    compiled = [module for module in modules if _compiled(module) is not None]
    is_whole = any(hasattr(module, "_orig_mod") for module in modules)
    return CompilationEvidence(
        torch_compile=len(compiled) > 0,
        torch_compile_mode=_mode(_compiled(compiled[0])) if compiled else "",
        torch_compile_scope="model" if is_whole else "layers" if compiled else "",
        compiled_modules=sorted({type(getattr(module, "_orig_mod", module)).__name__ for module in compiled}),
        compiled_graphs=dict(dynamo.counters["stats"]).get("unique_graphs", 0),
        graph_breaks=sum(dynamo.counters["graph_break"].values()),
        recompilations=sum(times - 1 for times in FRAME_COMPILE_COUNTER.values()),
    )


def _compiled(module: nn.Module) -> Any:
    """What dynamo wrapped to run in the place of ``module``; ``None``: nothing, as under TORCHDYNAMO_DISABLE."""
    wrapped = module if hasattr(module, "_orig_mod") else module._compiled_call_impl
    return wrapped if hasattr(wrapped, "get_compiler_config") else None


def _mode(compiled: Any) -> str:
    """The mode as torch.compile turned it into options of its compiler."""
    options = compiled.get_compiler_config() or {}
    autotune = bool(options.get("max_autotune")) and bool(options.get("coordinate_descent_tuning"))
    return _MODES[autotune, bool(options.get("triton.cudagraphs"))]


# (autotuned, CUDA graphs) -> mode.
_MODES = {
    (False, False): "default",
    (False, True): "reduce-overhead",
    (True, True): "max-autotune",
    (True, False): "max-autotune-no-cudagraphs",
}
