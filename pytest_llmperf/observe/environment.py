"""Where this rank runs (hardware, versions, variables that change speed), and what its training was set up with.

The latter is read off the objects that train, whoever made them. All of it is exact and the same in every launch of the
same training under the same software."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import nn

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.launch import Environment
from pytest_llmperf.support.files import boot_id, cpu_name, shipped

# A checkout of millions of lines on a slow file system is not worth more of a GPU's time.
_GIT_SECONDS = 2.0


def _known(section: str) -> Iterator[str]:
    yield from " ".join(_KNOWN[section].values()).split()


_KNOWN = shipped(__file__, "known.ini")
_VARIABLE_PREFIXES, _NOT_CAUSES = tuple(_known("watched")), frozenset(_known("no cause"))
# The interpreter's own; images name theirs PYTHON_VERSION and the like.
_OF_PYTHON = re.compile(r"PYTHON([A-Z]|_(GIL|JIT|PERF|CPU))")


def environment(device: torch.device) -> Environment:
    versions = {"python": platform.python_version()}
    for package in _known("packages"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = _version(metadata.distribution(package))
    # With its build, e.g. 2.11.0+cu130, which the distribution may not say.
    versions["torch"] = " ".join([torch.__version__, *versions.get("torch", "").split()[1:]])
    return Environment(
        gpu=device_name(device),
        driver=gpu.driver() if gpu.is_gpu(device) else "",
        versions=versions | gpu.versions(),
        variables=_variables(os.environ),
        platform=f"{platform.system()} {platform.machine()}",
    )


def place_of(device: torch.device) -> Place:
    """Where this rank runs, as its record has it."""
    name = device_name(device) + (f" {gpu.gpu_uuid(device)}" if gpu.is_gpu(device) else "")
    return Place(platform.node(), name, boot_id()[:8])  # where that is empty the host's name has to do


def device_name(device: torch.device) -> str:
    """``NVIDIA H200``, or the CPU's model name."""
    return gpu.gpu_name(device) if gpu.is_gpu(device) else cpu_name()


def _version(distribution: metadata.Distribution) -> str:
    """Its version, and where it was not installed from an index the commit: ``5.24.0.dev0 @1a2b3c4d5e6f`` (PEP 610)."""
    about = json.loads(distribution.read_text("direct_url.json") or "{}")
    commit = about.get("vcs_info", {}).get("commit_id", "")
    if about.get("dir_info", {}).get("editable"):
        # The one that is checked out, marked where files differ from it; empty: nobody knows.
        folder = unquote(about["url"].removeprefix("file://"))
        command = ["git", "-C", folder, "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
            commit = done.stdout.strip()
    return f"{distribution.version} @{commit[:12]}" if commit else distribution.version


#: Where packages are installed.
INSTALLED = ("site-packages", "dist-packages")
STDLIB = Path(os.__file__).resolve().parent
_PACKAGE = Path(__file__).resolve().parents[1]


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    found = {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_VARIABLE_PREFIXES) or _OF_PYTHON.match(name)) and name not in _NOT_CAUSES
    }
    if "PYTHONPATH" in found:
        # The launcher puts this package's own there, so that any interpreter finds it: none of the user's.
        paths = found["PYTHONPATH"].split(os.pathsep)
        users = [path for path in paths if not (Path(path) / _PACKAGE.name).resolve().is_relative_to(_PACKAGE)]
        found["PYTHONPATH"] = os.pathsep.join(users)
    return {name: value for name, value in found.items() if value}


# What watches stands around functions of torch and among hooks; it is no part of a training.
_OURS = f"{__package__.partition('.')[0]}."


def setup(model: nn.Module, optimizer: Any, callables: Callables) -> dict[str, Any]:
    """By topic; every value is plain data that JSON holds unchanged. ``callables``: as ``of_a_step`` takes them."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    of_all = sys.modules.get(torch.optim.Optimizer.__module__)  # torch.optim has no such name
    optimizer_hooks = sum(_number(of_all, f"_global{name}") + _number(optimizer, name) for name in names)
    return {
        "modules": dict(sorted(Counter(name_of(type(module)) for module in model.modules()).items())),
        "dropout": dropout(model),
        "training": all(module.training for module in model.modules()),
        "frozen_parameters": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "buffer_dtypes": dict(Counter(str(buffer.dtype) for buffer in model.buffers())),
        "hooks": hooks(model),
        "replaced_forwards": replaced_forwards(model),
        "optimizer": plain(dict(getattr(optimizer, "defaults", {}))),
        "parameter_groups": parameter_groups(optimizer),
        "torch": _torch_settings(),
        "python": _python_settings(),
        "step": of_a_step(model, optimizer, callables),
        # What costs time beside the work: how often garbage is looked for, and who listens to the optimizer.
        "overhead": {"gc_threshold": list(gc.get_threshold()), "optimizer_hooks": optimizer_hooks},
    }


#: What a configuration says that is no part of the work.
NOT_WORK = frozenset(_known("no work"))


def configuration(config: Any) -> dict[str, Any]:
    """Of a model of transformers', what it says of the work."""
    return dict(plain({k: v for k, v in config.to_dict().items() if k not in NOT_WORK}))


def parameter_groups(optimizer: Any) -> list[str]:
    """Of each group: how many parameters it updates, how fast before any schedule, and how much they decay."""
    groups = getattr(optimizer, "param_groups", [])
    rates = [g.get("initial_lr", g.get("lr")) for g in groups]
    return [
        f"{len(g['params'])} lr={r} weight_decay={g.get('weight_decay')}" for g, r in zip(groups, rates, strict=True)
    ]


def numel(parameter: nn.Parameter) -> int:
    """Its elements; DeepSpeed keeps those that it has parted elsewhere."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def dropout(model: nn.Module) -> dict[str, str]:
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


def hooks(model: nn.Module) -> dict[str, int]:
    """How many hooks run in a step, by kind; whoever looks at every activation has some. Ours are not counted."""
    counts = {name: sum(_number(module, name) for module in model.modules()) for name in _HOOKS}
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        counts[f"parameters{name}"] = sum(_number(p, name) for p in model.parameters())
    counts |= {f"global{name}": _number(nn.modules.module, f"_global{name}") for name in _HOOKS}
    return {name.strip("_"): count for name, count in counts.items() if count}


def _number(owner: Any, name: str) -> int:
    own = (getattr(owner, name, None) or {}).values()
    return sum(not str(getattr(hook, "__module__", "")).startswith(_OURS) for hook in own)


def replaced_forwards(model: nn.Module) -> list[str]:
    """Forward passes that another file defines than the one of their class; Liger's are among them."""
    found = set()
    for module in model.modules():
        own = forward(module)
        if getattr(own, "__module__", None) not in {cls.__module__ for cls in type(module).__mro__}:
            found.add(f"{type(module).__name__}: {name_of(own)}")
    return sorted(found)


def forward(module: nn.Module) -> Any:
    return inspect.unwrap(getattr(module.forward, "__func__", module.forward))


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
        "matmul_precision": gpu.matmul_precision(),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "reduced_precision_reduction": gpu.reduced_precision_reduction(),
        "sdpa_kernels": gpu.sdpa_kernels(),
    }
    if not gpu.has_gpu():
        settings |= {"threads": torch.get_num_threads(), "cpu_capability": torch.backends.cpu.get_cpu_capability()}
        settings["onednn"] = torch.backends.mkldnn.enabled
    return settings


# Callables: whose code runs in a step, read off the functions that run and not off the names that they go by.

# Deeper chains of decorators are none that anybody wrote.
DEEPEST = 20

# What a step calls by its name, beside the modules' forward passes.
Callables = Mapping[str, tuple[Any, str]]
_CALLABLES: Callables = {
    "Tensor": (torch.Tensor, "backward"),
    "autograd": (torch.autograd, "backward"),
    "functional": (
        nn.functional,
        "scaled_dot_product_attention cross_entropy linear embedding dropout silu gelu softmax layer_norm rms_norm",
    ),
}


def of_a_step(model: nn.Module, optimizer: Any, callables: Callables) -> dict[str, str]:
    """By what is called (``callables``: by the framework): the modules that define it, the outermost first."""
    found = {
        f"{name}.{function}": " > ".join(defining(getattr(owner, function, None)))
        for name, (owner, functions) in {**_CALLABLES, **callables}.items()
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
    for _ in range(DEEPEST):
        function = getattr(function, "__func__", function)  # a method's
        name = getattr(function, "__globals__", {}).get("__name__", "built in")
        if not name.startswith(_OURS):
            yield name
        if (function := getattr(function, "__wrapped__", None) or getattr(function, "func", None)) is None:
            return


def name_of(thing: Any) -> str:
    """Where it is defined and what it is called there; empty where it has no name."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    thing = getattr(thing, "func", thing)  # a partial's
    name = getattr(thing, "__qualname__", "") or type(thing).__qualname__
    return f"{getattr(thing, '__module__', '')}.{name}" if thing is not None else ""


def plain(value: Any) -> Any:
    """``value`` as JSON gives it back; what is no data by its name alone, since an address changes each time."""
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return name_of(value) if isinstance(value, Callable) else type(value).__qualname__  # type: ignore[arg-type]


class Project:
    """Whose code is the user's own: what is in the repository around ``folder`` and was not installed there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        above = (self.folder, *self.folder.parents)
        self.root = next((each for each in above if (each / ".git").exists()), self.folder)
        # Thousands of modules are asked for, of a few hundred folders.
        self._place_of = functools.cache(self._placed)

    def name_of(self, file: str) -> str:
        """``file`` as seen from the folder; empty where it is not the project's."""
        if file.startswith("<"):
            return ""
        is_plain = os.path.isabs(file) and not os.path.islink(file)  # noqa: PTH114, PTH117 - of thousands
        folder, name = os.path.split(file if is_plain else Path(file).resolve())
        place = self._place_of(folder)
        return "" if place is None else (place / name).as_posix()

    def _placed(self, folder: str) -> Path | None:
        path = Path(folder).resolve()
        if not path.is_relative_to(self.root) or path.is_relative_to(STDLIB):
            return None
        is_installed = {*INSTALLED, _PACKAGE.name}.intersection(path.relative_to(self.root).parts)
        return None if is_installed else Path(os.path.relpath(path, self.folder))
