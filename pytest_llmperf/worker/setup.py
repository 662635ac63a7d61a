"""What a training was set up with, as the objects that trained have it: configuration, modules, functions, source.

All of it is exact and the same in every launch of a spec under the same software. ``judge/exact.py``
holds it against the baseline's, so that nothing of it changes in silence.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import re
import sys
import sysconfig
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.integrations import hub_kernels
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pytest_llmperf.observe.device import has_gpu, matmul_precision, reduced_precision_reduction, sdpa_kernels
from pytest_llmperf.worker import installed
from pytest_llmperf.worker.build import NOT_WORK


def setup(trainer: Trainer, model: PreTrainedModel, optimizer: Any) -> dict[str, Any]:
    """By topic; every value is plain data that JSON holds unchanged."""
    modules, groups = list(model.modules()), getattr(optimizer, "param_groups", [])
    read, written = model.get_input_embeddings(), model.get_output_embeddings()
    return {
        "samples": getattr(trainer.train_dataset, "order", _name(type(trainer.train_dataset))),
        "collator": _name(trainer.data_collator),
        "callbacks": sorted(_name(type(callback)) for callback in trainer.callback_handler.callbacks),
        "config": _plain({k: v for k, v in model.config.to_dict().items() if k not in NOT_WORK}),
        "modules": dict(sorted(Counter(_name(type(module)) for module in modules).items())),
        "dropout": _dropout(model),
        "training": all(module.training for module in modules),
        "tied_weights": written is not None and getattr(written, "weight", None) is getattr(read, "weight", written),
        "frozen_parameters": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "buffer_dtypes": dict(Counter(str(buffer.dtype) for buffer in model.buffers())),
        "hooks": _hooks(model),
        "replaced_forwards": _replaced_forwards(model),
        "attention_function": _name(_attention_function(model)),
        "loss_function": _name(getattr(model, "loss_function", None)),
        "optimizer": _plain(dict(getattr(optimizer, "defaults", {}))),
        # Of each group: how many parameters it updates, how fast, and how much they decay.
        "parameter_groups": [
            f"{len(g['params'])} lr={g.get('lr')} weight_decay={g.get('weight_decay')}" for g in groups
        ],
        "schedule": str(trainer.args.lr_scheduler_type.value),
        "max_grad_norm": float(trainer.args.max_grad_norm),
        "torch": _torch_settings(),
        "python": _python_settings(),
        "step": of_a_step(model, optimizer),
        "functions": optional_functions(model),
        # What costs time beside the work: how often garbage is looked for, and who listens to the optimizer.
        "overhead": {"gc_threshold": list(gc.get_threshold()), "optimizer_hooks": _optimizer_hooks(optimizer)},
        "sources": dict(_sources(model, optimizer)),
        "patched": installed.patched_files(),
    }


def _dropout(model: nn.Module) -> dict[str, str]:
    """Every probability that is not zero and how often, by who has it: a dropout module, or a module's own field."""
    found: dict[str, Counter[float]] = {}
    for module in model.modules():
        own = {"p": module.p} if isinstance(module, nn.modules.dropout._DropoutNd) else {}  # noqa: SLF001 - their base
        fields = {name: value for name, value in vars(module).items() if "drop" in name}
        for name, value in {**own, **fields}.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value:
                found.setdefault(f"{type(module).__name__}.{name}", Counter())[float(value)] += 1
    return {
        name: ", ".join(f"{p:g} x{number}" for p, number in sorted(counts.items()))
        for name, counts in sorted(found.items())
    }


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hooks(model: nn.Module) -> dict[str, int]:
    """How many hooks run in a step, by kind; whoever looks at every activation has some."""
    counts = {name: sum(len(getattr(module, name)) for module in model.modules()) for name in _HOOKS}
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        counts[f"parameters{name}"] = sum(len(getattr(p, name, None) or ()) for p in model.parameters())
    counts |= {f"global{name}": len(getattr(nn.modules.module, f"_global{name}", ())) for name in _HOOKS}
    return {name.strip("_"): count for name, count in counts.items() if count}


def _optimizer_hooks(optimizer: Any) -> int:
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    of_all = sys.modules.get(torch.optim.Optimizer.__module__)
    return sum(len(getattr(of_all, f"_global{name}", ())) + len(getattr(optimizer, name, ())) for name in names)


def _replaced_forwards(model: nn.Module) -> list[str]:
    """Forward passes that another file defines than the one of their class; Liger's are among them."""
    found = set()
    for module in model.modules():
        forward = _forward(module)
        if getattr(forward, "__module__", None) not in {cls.__module__ for cls in type(module).__mro__}:
            found.add(f"{type(module).__name__}: {_name(forward)}")
    return sorted(found)


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(getattr(module.forward, "__func__", module.forward))


def _attention_function(model: PreTrainedModel) -> Any:
    """The function that transformers' registry has for the model's attention; for eager, the model's own."""
    own = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation, own)


def _python_settings() -> dict[str, Any]:
    """Modes that slow every line, as a debugger, a profiler or a measurement of coverage switches them on."""
    monitoring = getattr(sys, "monitoring", None)
    modes = {
        "tracemalloc": tracemalloc.is_tracing(),
        "dev_mode": sys.flags.dev_mode,
        "debug": bool(sys.flags.debug),
        "monitored": monitoring is not None and any(map(monitoring.get_tool, range(6))),
    }
    always = {"traced": sys.gettrace() is not None, "profiled": sys.getprofile() is not None, "gc": gc.isenabled()}
    # A record from before these modes were looked at has none of them, as one without them.
    return always | {name: True for name, is_on in modes.items() if is_on}


def _torch_settings() -> dict[str, Any]:
    """Settings that change arithmetic or speed and stand in no environment variable."""
    settings: dict[str, Any] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly_detection": torch.is_anomaly_enabled(),
        "profiler": bool(torch.autograd._profiler_enabled()),  # noqa: SLF001 - told nowhere else
        "matmul_precision": matmul_precision(),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "reduced_precision_reduction": reduced_precision_reduction(),
        "sdpa_kernels": sdpa_kernels(),
    }
    if not has_gpu():
        settings |= {"threads": torch.get_num_threads(), "cpu_capability": torch.backends.cpu.get_cpu_capability()}
        settings["onednn"] = torch.backends.mkldnn.enabled
    return settings


# Callables: whose code runs in a step, read off the functions that run and not off the names that they go by.

# Deeper chains of decorators are none that anybody wrote.
_DEEPEST = 20

# What a step calls by its name, beside the modules' forward passes.
_CALLABLES_OF_A_STEP: dict[str, tuple[Any, str]] = {
    "Trainer": (Trainer, "training_step compute_loss _prepare_inputs _inner_training_loop"),
    "Accelerator": (Accelerator, "backward clip_grad_norm_ autocast"),
    "Tensor": (torch.Tensor, "backward"),
    "autograd": (torch.autograd, "backward"),
    "functional": (
        nn.functional,
        "scaled_dot_product_attention cross_entropy linear embedding dropout silu gelu softmax layer_norm rms_norm",
    ),
}


def of_a_step(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """By what is called: the modules that define it, the outermost first; of forward passes where there are several."""
    found = {
        f"{name}.{function}": " > ".join(defining(getattr(owner, function, None)))
        for name, (owner, functions) in _CALLABLES_OF_A_STEP.items()
        for function in functions.split()
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
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if function is None:
            return


# Whose functions and classes are there in any environment that trains.
_ALWAYS_THERE = frozenset({"torch", "transformers", "huggingface_hub", "pytest_llmperf"}) | sys.stdlib_module_names

# Modules that say nothing of one family.
_OF_ALL_MODELS = re.compile(r"builtins|torch\b|transformers\.(?!models\.)")
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


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


def _provider(value: Any) -> str:
    """Whose code ``value`` runs; empty of what has no fall-back."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (*_FUNCTIONS, type)):
        return ""
    reached = list(_reached(value, 0))
    packages = {name.partition(".")[0] for name in reached}
    # What wraps another function has chosen one.
    own = "transformers" if len(reached) > 1 and "transformers" in packages else ""
    return " + ".join(sorted(packages - _ALWAYS_THERE)) or own


def _reached(value: Any, depth: int) -> Iterator[str]:
    """The module of ``value``, and of each function that it wraps, keeps in its closure or was made of."""
    yield getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None) or "builtins"
    if depth < _DEEPEST and isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty one
                if isinstance(cell.cell_contents, _FUNCTIONS) or hasattr(cell.cell_contents, "func"):
                    yield from _reached(cell.cell_contents, depth + 1)


# Sources.

# Whose code runs in a step beside the model's own, of a package too large to be read as a whole.
_OF_A_STEP = re.compile(
    r"transformers\.(trainer\w*|optimization|masking_utils|cache_utils|activations|pytorch_utils|modeling_\w+"
    r"|loss\.loss_utils|data\.data_collator|utils\.(generic|output_capturing)"
    r"|integrations\.(\w*attention|moe|liger|fsdp|accelerate))"
)

# Packages of which each file may have a part in a step.
_WHOLE = ("accelerate", "liger_kernel", "flash_attn", "torchao", "bitsandbytes")

# Run by Python itself at its start, where they are.
_AT_START = ("sitecustomize", "usercustomize")


def _sources(model: PreTrainedModel, optimizer: Any) -> Iterator[tuple[str, str]]:
    """Digests of the Python files whose code a step runs, by module: a patched one has the same version.

    Of transformers each module of the model's side that was imported, of smaller packages all of their files at once.
    """
    things: list[Any] = [*type(model).__mro__, *(type(module) for module in model.modules()), type(optimizer)]
    things += [_attention_function(model), getattr(model, "loss_function", None), *map(_forward, model.modules())]
    names = {getattr(each, "__module__", None) or "" for each in things} | {*_AT_START}
    names |= {name for name in sys.modules if _OF_A_STEP.fullmatch(name)}
    for name in sorted(names):
        module = sys.modules.get(name)
        if module is None or name.partition(".")[0] in ("torch", *_WHOLE):
            continue
        if name in _AT_START and _is_the_interpreters(module):
            continue
        with suppress(OSError, TypeError):  # built in, or of an archive
            yield name, installed.short_digest(Path(inspect.getsourcefile(module) or "").read_bytes())
    for name in _WHOLE:
        if name in sys.modules:
            hashed = hashlib.sha256()
            for folder in sys.modules[name].__path__:
                for path in sorted(Path(folder).rglob("*.py")):
                    with suppress(OSError):
                        hashed.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
            yield name, hashed.hexdigest()[: installed.DIGITS]


def _is_the_interpreters(module: ModuleType) -> bool:
    """Whether it came with Python, as Debian's does: another machine's Python has another, or none."""
    folder = Path(getattr(module, "__file__", None) or "").parent
    return folder in {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}


def _name(thing: Any) -> str:
    """Where it is defined and what it is called there; empty where it has no name."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    thing = getattr(thing, "func", thing)  # a partial's
    name = getattr(thing, "__qualname__", "") or type(thing).__qualname__
    return f"{getattr(thing, '__module__', '')}.{name}" if thing is not None else ""


def _plain(value: Any) -> Any:
    """``value`` as JSON gives it back; what is no data by its name alone, since an address changes each time."""
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return _name(value) if isinstance(value, Callable) else type(value).__qualname__  # type: ignore[arg-type]
