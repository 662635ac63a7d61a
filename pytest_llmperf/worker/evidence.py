"""What was really active in a launch, read off the objects that trained and not off the request."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch._dynamo.utils as dynamo
from torch import nn
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.settings import fault_injection
from pytest_llmperf.settings.checks import FP8_RECIPES
from pytest_llmperf.support.codec import flat
from pytest_llmperf.worker import data_workers
from pytest_llmperf.worker.build import found_settings
from pytest_llmperf.worker.setup import setup


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


def kept_dtypes(model: PreTrainedModel, asked: torch.dtype) -> dict[str, int]:
    """Elements of the parameters that the model's own class makes in another type than ``asked``, by type.

    Routers, gates and decay rates of a dozen families stay in fp32 on purpose. What the class does is seen on a twin
    without storage, built only where types differ; a parameter that differs from its twin is not counted.
    """
    other = {name: p for name, p in model.named_parameters() if p.dtype != asked}
    if not other:
        return {}
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(deepcopy(model.config), dtype=asked)
    listed = (getattr(model, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    patterns = [pattern for patterns in listed for pattern in patterns or ()]
    made = {name: p.dtype for name, p in twin.named_parameters()}
    kept: dict[str, int] = {}
    for name, p in other.items():
        is_named = p.dtype == torch.float32 and any(re.search(rf"(^|\.){each}($|\.)", name) for each in patterns)
        if is_named or p.dtype == made.get(name):
            kept[str(p.dtype)] = kept.get(str(p.dtype), 0) + p.numel()
    return kept


def collect(
    trainer: Trainer, model: PreTrainedModel, asked: torch.dtype, autocast: AutocastWitness, liger: LigerNotes
) -> dict[str, Any]:
    """Everything ``judge/evidence_checks.py`` holds against the spec; called once, after all that is timed.

    Which operators attention calls is not tried yet: steps that are traced may follow. ``asked``: the weights' type.
    """
    optimizer = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    device, wrapped = next(model.parameters()).device, trainer.model_wrapped
    return gathered(
        {
            "run": lambda: {
                "device_type": device.type,
                "world_size": trainer.args.world_size,
                "injected": os.environ.get(fault_injection.VARIABLE, ""),
            },
            "attention": lambda: {"attention": str(model.config._attn_implementation)},
            "parameter_dtypes": lambda: {
                "parameter_dtypes": parameter_dtypes(model),
                **({"kept_dtypes": kept} if (kept := kept_dtypes(model, asked)) else {}),
            },
            "autocast": lambda: {"autocast_dtype": autocast.dtype, "tf32": _tf32_rounds(device)},
            "liger": lambda: _liger(model, liger),
            "optimizer": lambda: {
                "optimizer": type(optimizer).__name__,
                "optimizer_fused": bool(optimizer.defaults.get("fused")) if optimizer is not None else False,
                **_optimizer_states(optimizer),
            },
            "gradient_checkpointing": lambda: {
                "gradient_checkpointing": any(
                    getattr(each, "gradient_checkpointing", False) for each in model.modules()
                ),
                "checkpointing_policy": _checkpointing_policy(model),
            },
            "fp8": lambda: _fp8(model),
            "loss_scaling": lambda: {"loss_scaling": getattr(trainer.accelerator, "scaler", None) is not None},
            "parallelism": lambda: _parallelism(wrapped),
            "torch_compile": lambda: _compilation(wrapped),
            "allocator": lambda: {"allocator_retries": _allocator_retries(device)},
            "data_workers": lambda: data_workers.seen(
                trainer.callback_handler.train_dataloader, on_gpu=gpu.is_gpu(device)
            ),
            "found": lambda: {"found": dict(found_settings())},
            "setup": lambda: {"setup": setup(trainer, model, optimizer)},
        }
    )


def gathered(collectors: Mapping[str, Callable[[], Mapping[str, Any]]]) -> dict[str, Any]:
    """What ``collectors`` found. One that raises takes nothing from a measurement: its error is in ``uncollected``."""
    found: dict[str, Any] = {}
    uncollected: dict[str, str] = {}
    for name, collector in collectors.items():
        try:
            found |= collector()
        except Exception as error:  # noqa: BLE001 - whatever an upgrade or a setting of the user's made of its object
            uncollected[name] = f"{type(error).__name__}: {error}"
    return found | ({"uncollected": uncollected} if uncollected else {})


def _liger(model: nn.Module, notes: LigerNotes) -> dict[str, Any]:
    forwards = _liger_forwards(model)
    return {
        "liger_modules": len(forwards),
        "liger_forwards": sorted(set(forwards)),
        "liger_functions": _liger_functions(model),
        "liger_note": notes.lines[-1] if notes.lines else "",
    }


def _compilation(model: nn.Module | None) -> dict[str, Any]:
    return {
        "torch_compile": _is_compiled(model),
        "torch_compile_mode": _compile_mode(model),
        "torch_compile_scope": _compile_scope(model),
        "compiled_modules": _compiled_modules(model),
        "compiled_graphs": dict(dynamo.counters["stats"]).get("unique_graphs", 0),
        "graph_breaks": sum(dynamo.counters["graph_break"].values()),
        "recompilations": sum(times - 1 for times in FRAME_COMPILE_COUNTER.values()),
    }


def _allocator_retries(device: torch.device) -> int:
    return gpu.allocator_failures()[0] if gpu.is_gpu(device) else 0


def _optimizer_states(optimizer: Any) -> dict[str, Any]:
    """How it keeps its states, as bitsandbytes' optimizers tell; of others the class says it."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return {
        "optimizer_bits": "" if bits is None else f"{bits}bit",
        "optimizer_paged": bool(getattr(optimizer, "is_paged", False)),
    }


def merged(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's evidence; what other ranks saw differently is in ``other_ranks``, by name and then by rank."""
    worst = {name: of(seen[name] for seen in by_rank) for name, of in _COUNTS.items() if name in by_rank[0]}
    facts = [dict(flat({name: seen[name] for name in seen if name not in _COUNTS})) for seen in by_rank]
    names = dict.fromkeys(name for seen in facts for name in seen if name not in _OF_THE_HOST)
    others = {
        name: {
            str(rank): seen.get(name) for rank, seen in enumerate(facts) if _differ(seen.get(name), facts[0].get(name))
        }
        for name in names
    }
    others = {name: ranks for name, ranks in others.items() if ranks}
    return {**by_rank[0], **worst, **({"other_ranks": others} if others else {})}


# Ranks need not compile alike: the worst of them counts.
_COUNTS: Mapping[str, Callable[[Iterable[int]], int]] = {
    "compiled_graphs": min,
    "graph_breaks": max,
    "recompilations": max,
    "allocator_retries": max,
    "checkpoint_bytes": max,
}


# Ranks of one training may run on processors of two generations; what that does is seen in the clock.
_OF_THE_HOST = frozenset({"setup.torch.cpu_capability"})


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


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks share its weights; accelerate shards the layers, and not always what is around them."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def attention_kernel(trainer: Trainer, model: PreTrainedModel) -> str:
    """The attention operators that one more sequence calls, after all steps; empty: plain matrix products.

    ``unknown`` where the sequence does not go through, for want of memory or because an operator cannot be watched.
    flex_attention is not tried, since it would compile once more for a batch of one; nor is a sharded model, of which
    all ranks must gather the weights: one that failed alone would leave the others waiting.
    """
    if model.config._attn_implementation == "flex_attention" or is_sharded(model):
        return "unknown"
    batch = trainer.train_dataset[0]
    inputs = {name: value.unsqueeze(0).to(model.device) for name, value in batch.items()}
    try:
        with trainer.accelerator.autocast(), _AttentionOps() as seen:
            model(**inputs)
    except Exception:  # noqa: BLE001 - whatever stands in the way, the measurement is done and counts
        return "unknown"
    return " ".join(seen.names)


def _liger_forwards(model: nn.Module) -> list[str]:
    """Of each module whose forward pass is one of Liger's, that function's name."""

    def forward_of(module: nn.Module) -> Any:
        forward = getattr(module.forward, "__func__", module.forward)
        return getattr(forward, "__wrapped__", forward)

    def is_patched(module: nn.Module) -> bool:
        where = getattr(forward_of(module), "__module__", "") or ""
        return "liger_kernel" in where or "liger_kernel" in type(module).__module__

    return [forward_of(module).__qualname__ for module in model.modules() if is_patched(module)]


def _is_compiled(model: nn.Module | None) -> bool:
    return bool(_compiled_modules(model))


def _compiled(module: nn.Module) -> Any:
    """What dynamo wrapped to run in the place of ``module``; ``None``: nothing, as under TORCHDYNAMO_DISABLE."""
    wrapped = module if hasattr(module, "_orig_mod") else module._compiled_call_impl
    return wrapped if hasattr(wrapped, "get_compiler_config") else None


def _compiled_modules(model: nn.Module | None) -> list[str]:
    """The kinds of the modules that are compiled, each by itself."""
    modules = model.modules() if model is not None else ()
    # Not by truth: a compiled model answers that by a length, which it has none of.
    return sorted({type(getattr(m, "_orig_mod", m)).__name__ for m in modules if _compiled(m) is not None})


def _liger_functions(model: nn.Module) -> list[str]:
    """What of Liger replaces functions, which no module shows: ``rope`` and ``cross_entropy``."""
    functions = {
        "rope": getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None),
        "cross_entropy": nn.functional.cross_entropy,
    }
    return [name for name, function in functions.items() if "liger" in (getattr(function, "__module__", "") or "")]


def _compile_mode(model: nn.Module | None) -> str:
    """The mode as torch.compile turned it into options of its compiler; empty: not compiled."""
    for module in model.modules() if model is not None else ():
        compiled = _compiled(module)
        if compiled is not None:
            options = compiled.get_compiler_config() or {}
            autotune = bool(options.get("max_autotune")) and bool(options.get("coordinate_descent_tuning"))
            return _MODES[autotune, bool(options.get("triton.cudagraphs"))]
    return ""


def _compile_scope(model: nn.Module | None) -> str:
    """``model`` where a compiled one took its place, ``layers`` where modules compile in place; empty: neither."""
    modules = list(model.modules()) if model is not None else []
    if any(hasattr(module, "_orig_mod") for module in modules):
        return "model"
    return "layers" if any(_compiled(module) is not None for module in modules) else ""


def _fp8(model: nn.Module) -> dict[str, Any]:
    """How many linear layers multiply in fp8, how many do not, and by which of torchao's recipes."""
    kinds = [type(module).__name__ for module in model.modules()]
    converted = next((module for module in model.modules() if type(module).__name__ == "Float8Linear"), None)
    recipe = ""
    if converted is not None:
        from torchao.float8 import Float8LinearConfig  # noqa: PLC0415 - only fp8 needs the package

        found = (name for name in FP8_RECIPES[1:] if Float8LinearConfig.from_recipe_name(name) == converted.config)
        recipe = next(found, "another")
    return {"fp8_modules": kinds.count("Float8Linear"), "linear_modules": kinds.count("Linear"), "fp8_recipe": recipe}


# (autotuned, CUDA graphs) -> mode.
_MODES = {
    (False, False): "default",
    (False, True): "reduce-overhead",
    (True, True): "max-autotune",
    (True, False): "max-autotune-no-cudagraphs",
}


def _checkpointing_policy(model: nn.Module) -> str:
    """What the layers' checkpoint function recomputes; empty: there is none."""
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None and getattr(module, "gradient_checkpointing", False):
            return "selective" if "context_fn" in getattr(function, "keywords", {}) else "full"
    return ""


def _parallelism(model: nn.Module | None) -> dict[str, Any]:
    """How the ranks share the work, and the sizes of the mesh that the weights are sharded over."""
    modules = list(model.modules()) if model is not None else []
    sharded = next((module for module in modules if isinstance(module, FSDPModule)), None)
    if sharded is not None:
        meshes = {p.device_mesh.shape for module in modules for p in module.parameters() if isinstance(p, DTensor)}
        mesh = [size for size in max(meshes, key=len, default=()) if size > 1]
        # FSDP casts the weights of each layer as it gathers them, in the place of autocast.
        cast_to = sharded._get_fsdp_state()._mp_policy.param_dtype  # noqa: SLF001 - told nowhere else
        return {
            "parallelism": "fsdp_hybrid" if len(mesh) > 1 else "fsdp",
            "mesh": mesh,
            "gathered_dtype": "" if cast_to is None else str(cast_to),
        }
    is_ddp = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)
    return {"parallelism": "ddp" if is_ddp else "none", "mesh": []}


def _tf32_rounds(device: torch.device) -> bool:
    """Whether an fp32 matrix product on this device loses the bits that TF32 drops (it keeps 10 of 23)."""
    if not gpu.is_gpu(device):
        return False
    finer_than_tf32 = 1 + 2.0**-13
    matrix = torch.full((256, 256), finer_than_tf32, device=device)
    product = matrix @ torch.eye(256, device=device)
    return bool((product != matrix).any().item())
