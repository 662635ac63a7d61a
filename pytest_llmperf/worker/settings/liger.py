"""Kernels in the place of a model's own: what Liger's patch is told to replace, and which of a model's functions and
forward passes are Liger's; and the layers that a hub repository's kernels compute."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.liger import LIGER_KERNELS, HubKernel, HubKernelsEvidence, LigerEvidence, hub_kernels
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import of_files
from pytest_llmperf.support.user_input import hint
from pytest_llmperf.worker.settings import Training, Witness


def liger_kernels(spec: TrainSpec) -> dict[str, bool] | None:
    """What Liger's patch is told to replace; ``None``: what it replaces by itself."""
    chosen = spec.liger_kernels.split("+")
    return None if chosen == ["all"] else {name: name in chosen for name in LIGER_KERNELS}


def arguments(spec: TrainSpec, _device: torch.device) -> Mapping[str, Any]:
    return {"use_liger_kernel": spec.liger, "liger_kernel_config": liger_kernels(spec)}


def _liger_watched(*_: Any) -> Callable[[Training], LigerEvidence]:
    """Keeps what Liger says when it patches nothing: one INFO line is all it gives. The rest is seen at the end."""
    lines, logger, handler = list[str](), logging.getLogger("liger_kernel.transformers.monkey_patch"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def seen(training: Training) -> LigerEvidence:
        forwards = liger_forwards(training.model)
        return LigerEvidence(
            liger_modules=len(forwards),
            liger_forwards=sorted(set(forwards)),
            liger_functions=liger_functions(training.model),
            liger_note=lines[-1] if lines else "",
        )

    return seen


def liger_forwards(model: nn.Module) -> list[str]:
    """Of each module whose forward pass is one of Liger's, that function's name."""
    found = []
    for module in model.modules():
        forward = getattr(module.forward, "__func__", module.forward)
        forward = getattr(forward, "__wrapped__", forward)
        if "liger_kernel" in (getattr(forward, "__module__", "") or "") + type(module).__module__:
            found.append(str(forward.__qualname__))
    return found


def liger_functions(model: nn.Module) -> list[str]:
    """What of Liger replaces functions, which no module shows: ``rope`` and ``cross_entropy``."""
    functions = {
        "rope": getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None),
        "cross_entropy": nn.functional.cross_entropy,
    }
    return [name for name, function in functions.items() if "liger" in (getattr(function, "__module__", "") or "")]


# Hub kernels: by the library's own ``kernelize``. transformers' ``KernelConfig`` goes there too, has no CPU, takes few
# versions of the library, and keeps a layer as it was where a kernel cannot be loaded.
_MARK = "kernel_layer_name"


def _called(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules of this class, or that transformers has marked as layers of this name."""
    return [each for each in model.modules() if name in (type(each).__name__, getattr(each, _MARK, ""))]


def replace_layers(spec: TrainSpec, model: nn.Module) -> None:
    """Let hub kernels compute the layers that ``spec`` names. RefusedError: one cannot, or the model has no such."""
    asked = hub_kernels(spec)
    layers = {name: {*_called(model, name)} for name in asked}
    for name in (name for name, modules in layers.items() if not modules):
        has = sorted({type(each).__name__ for each in model.modules()})
        raise RefusedError(f"hub_kernels: the model has no layer {name!r}{hint(name, has)}; it has {', '.join(has)}")
    device = next(model.parameters()).device.type
    # A module before what lies in it, which the library puts back to its own forward pass.
    for module, name in ((each, name) for each in model.modules() for name in asked if each in layers[name]):
        try:
            _replace(module, name, asked[name], device, compiled=spec.torch_compile)
        except Exception as error:  # whatever a kernel's own code raises where it is imported
            said = " ".join(str(error).split())[:200]
            raise RefusedError(f"hub_kernels: {name} by {asked[name]}: {said}") from error
    for name, kernel in asked.items():
        if left := sum(_origin(each) is None for each in layers[name]):
            why = "it has no backward pass, or none that compiles"
            raise RefusedError(f"hub_kernels: {name} by {kernel}: {left} modules are left as they were: {why}")


def _replace(module: nn.Module, name: str, kernel: HubKernel, device: str, *, compiled: bool) -> None:
    import kernels  # noqa: PLC0415 - only this setting needs the package

    if not hasattr(kernels, "get_loaded_kernels"):
        raise RefusedError("this version of kernels does not tell what it has loaded; pip install --upgrade kernels")
    if not hasattr(module, _MARK):
        kernels.replace_kernel_forward_from_hub(type(module), name)
    layer = kernels.LocalLayerRepository(kernel.folder.resolve(), layer_name=kernel.layer)
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE if compiled else kernels.Mode.TRAINING
    with kernels.use_kernel_mapping({getattr(module, _MARK): {device: layer}}, inherit_mapping=False):
        kernels.kernelize(module, mode=mode, device=device)


def _origin(module: nn.Module, layer: str = "") -> tuple[Any, str] | None:
    """The kernel that the library has loaded and the layer of it whose forward pass ``module`` runs: of several that
    have that one, ``layer`` where it is among them."""
    own = inspect.unwrap(getattr(vars(module).get("forward"), "__func__", _origin))
    for loaded in getattr(sys.modules.get("kernels"), "get_loaded_kernels", tuple)():
        has = vars(getattr(loaded.module, "layers", loaded.module))
        names = [each for each in has if str(getattr(has[each], "__module__", "")).startswith(loaded.module.__name__)]
        if its := [each for each in names if inspect.unwrap(getattr(has[each], "forward", type)) is own]:
            return loaded, layer if layer in its else its[0]
    return None


def _watched(spec: TrainSpec, model: nn.Module) -> Callable[[Training], HubKernelsEvidence]:
    asked = {name: (_called(model, name), kernel.layer) for name, kernel in hub_kernels(spec).items()}

    def seen(training: Training) -> HubKernelsEvidence:
        known = {each for modules, _ in asked.values() for each in modules}
        others = {type(each).__name__ for each in {*training.model.modules()} - known if _origin(each)}
        layers = asked | {name: (_called(training.model, name), "") for name in others}
        return HubKernelsEvidence(hub_kernels={name: _told(*each) for name, each in layers.items()} or None)

    return seen


def _told(modules: list[nn.Module], asked: str) -> dict[str, Any]:
    origins = [origin for each in modules if (origin := _origin(each, asked))]
    found = {"modules": len(origins), "left": len(modules) - len(origins)}
    if not origins:
        return found
    (loaded, layer), *_ = origins
    name = str(loaded.metadata.name)
    repository, revision = _revision(Path(loaded.module.__file__).parent, name)
    return found | {"layer": layer, "kernel": name, "repository": repository, "revision": revision}


_CACHED = re.compile(r"/[a-z]+--([^/]+)/snapshots/([0-9a-f]+)/")


def _revision(build: Path, name: str) -> tuple[str, str]:
    """Of the repository of a ``build``: what the hub's cache says, else a checkout's commit, else a digest of files."""
    if found := _CACHED.search(f"{build}/"):
        return found[1].replace("--", "/"), found[2]
    variant = build if (build / "metadata.json").exists() else build.parent  # build/VARIANT, or a package in it
    for folder in (each for each in (build, variant, *variant.parents[:2]) if (each / ".git").exists()):
        with suppress(OSError, subprocess.SubprocessError):
            words = ("git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
            return name, subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    files = sorted(path for path in build.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return name, of_files((str(path.relative_to(build)), path) for path in files)


WITNESSES: Mapping[str, Witness] = {"liger": _liger_watched, "hub_kernels": _watched}
PREPARE = replace_layers
