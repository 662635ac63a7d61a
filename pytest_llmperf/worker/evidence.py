"""What was active in a launch and what it was set up with, read off the objects that trained and not off the request.

All of a setup is the same in every launch of a spec under the same software: it is held against the baseline's."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.integrations import hub_kernels
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pytest_llmperf.observe import environment
from pytest_llmperf.observe.device import is_gpu, room
from pytest_llmperf.settings.registry import SETTINGS, RunEvidence
from pytest_llmperf.settings.setting import gathered
from pytest_llmperf.settings.train_spec import INJECT, TrainSpec
from pytest_llmperf.worker import imports, settings
from pytest_llmperf.worker.settings import Training, attention

#: Tried last of all.
last_kernels = attention.last_kernels


def watched(spec: TrainSpec, model: PreTrainedModel) -> Callable[[Trainer], dict[str, Any]]:
    """Let each setting's witness watch a training, before its Trainer is made; the answer gives what they saw, once."""
    makers: dict[str, settings.Witness] = {}
    for witnesses_of in settings.of_twins("WITNESSES"):
        makers |= witnesses_of
    witnesses: Mapping[str, Callable[[Training], Any]] = {
        "run": lambda training: RunEvidence(
            device_type=training.device.type,
            injected=os.environ.get(INJECT, ""),
            allocator_retries=room().retries if is_gpu(training.device) else 0,
            found=attention.found_settings(),
        ),
        **{each.name: makers[each.name](spec, model) for each in SETTINGS if each.name in makers},
        "setup": lambda training: {"setup": setup(training.trainer, training.model, training.optimizer)},
    }
    return lambda trainer: gathered({name: partial(each, Training(trainer, model)) for name, each in witnesses.items()})


def setup(trainer: Trainer, model: PreTrainedModel, optimizer: Any) -> dict[str, Any]:
    """By topic; every value is plain data that JSON holds unchanged."""
    read, written = model.get_input_embeddings(), model.get_output_embeddings()
    return {
        **environment.setup(model, optimizer, _CALLABLES),
        "samples": getattr(trainer.train_dataset, "order", environment.name_of(type(trainer.train_dataset))),
        "collator": environment.name_of(trainer.data_collator),
        "callbacks": sorted(environment.name_of(type(callback)) for callback in trainer.callback_handler.callbacks),
        "config": environment.configuration(model.config),
        "tied_weights": written is not None and getattr(written, "weight", None) is getattr(read, "weight", written),
        "attention_function": environment.name_of(_attention_function(model)),
        "loss_function": environment.name_of(getattr(model, "loss_function", None)),
        "schedule": str(trainer.args.lr_scheduler_type.value),
        "max_grad_norm": float(trainer.args.max_grad_norm),
        "functions": optional_functions(model),
        "sources": dict(_sources(model, optimizer)),
        "patched": imports.patched_files(),
    }


# What a step of the Trainer's calls by its name.
_CALLABLES: environment.Callables = {
    "Trainer": (Trainer, "training_step compute_loss _prepare_inputs _inner_training_loop"),
    "Accelerator": (Accelerator, "backward clip_grad_norm_ autocast"),
}


def _attention_function(model: PreTrainedModel) -> Any:
    """The function that transformers' registry has for the model's attention; for eager, the model's own."""
    own = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation, own)


# Whose functions and classes are there in any environment that trains.
_ALWAYS_THERE = frozenset({"torch", "transformers", "huggingface_hub", "pytest_llmperf"}) | sys.stdlib_module_names

# What wraps a function for the old name of an argument, and chooses nothing.
_RENAMES = "transformers.utils.deprecation"

# Modules that say nothing of one family.
_OF_ALL_MODELS = re.compile(r"builtins|torch\b|transformers\.(?!models\.)")
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


def optional_functions(model: nn.Module) -> dict[str, str]:
    """By name, the packages whose code runs for what transformers has a fall-back of: ``causal_conv1d_fn: fla``. A
    modeling module has them as functions, as names that are imported or ``None``, and as flags; modules keep some."""
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
    reached = [name for name in _reached(value, 0) if name != _RENAMES]
    packages = {name.partition(".")[0] for name in reached}
    # What wraps another function has chosen one.
    own = "transformers" if len(reached) > 1 and "transformers" in packages else ""
    return " + ".join(sorted(packages - _ALWAYS_THERE)) or own


def _reached(value: Any, depth: int) -> Iterator[str]:
    """The module of ``value``, and of each function that it wraps, keeps in its closure or was made of."""
    yield getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None) or "builtins"
    if depth < environment.DEEPEST and isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty one
                if isinstance(cell.cell_contents, _FUNCTIONS) or hasattr(cell.cell_contents, "func"):
                    yield from _reached(cell.cell_contents, depth + 1)


# Whose code runs in a step beside the model's own, of a package too large to be read as a whole.
_OF_A_STEP = re.compile(
    r"transformers\.(trainer\w*|optimization|masking_utils|cache_utils|activations|pytorch_utils|modeling_\w+"
    r"|loss\.loss_utils|data\.data_collator|utils\.(generic|output_capturing)"
    r"|integrations\.(\w*attention|moe|liger|fsdp|accelerate))"
)

# Packages of which each file may have a part in a step, and what Python itself runs at its start.
_WHOLE = ("accelerate", "liger_kernel", "flash_attn", "torchao", "bitsandbytes", "peft")
_AT_START = ("sitecustomize", "usercustomize")


def _sources(model: PreTrainedModel, optimizer: Any) -> Iterator[tuple[str, str]]:
    """Digests of the Python files whose code a step runs, by module; of smaller packages all files at once."""
    things: list[Any] = [*type(model).__mro__, *(type(module) for module in model.modules()), type(optimizer)]
    things += [_attention_function(model), getattr(model, "loss_function", None)]
    things += map(environment.forward, model.modules())
    names = {getattr(each, "__module__", None) or "" for each in things} | {*_AT_START}
    names |= {name for name in sys.modules if _OF_A_STEP.fullmatch(name)}
    for name in sorted(names):
        module = sys.modules.get(name)
        if module is None or name.partition(".")[0] in ("torch", *_WHOLE):
            continue
        if name in _AT_START and _is_the_interpreters(module):
            continue
        with suppress(OSError, TypeError):  # built in, or of an archive
            yield name, imports.short_digest(Path(inspect.getsourcefile(module) or "").read_bytes())
    for name in _WHOLE:
        if name in sys.modules:
            hashed = hashlib.sha256()
            for folder in sys.modules[name].__path__:
                for path in sorted(Path(folder).rglob("*.py")):
                    with suppress(OSError):
                        hashed.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
            yield name, hashed.hexdigest()[: imports.DIGITS]


def _is_the_interpreters(module: ModuleType) -> bool:
    """Whether it came with Python, as Debian's does: another machine's Python has another, or none."""
    folder = Path(getattr(module, "__file__", None) or "").parent
    return folder in {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
