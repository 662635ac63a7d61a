"""What was active in a user's own training, and of what it was made: read off its objects, its modules and its files.

It is the same in two launches of one command: no addresses, and files by their names in the project. What cannot be
known of a script is not claimed. A collector that fails takes nothing from the measurement.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from pytest_llmperf.observe import objects
from pytest_llmperf.observe.objects import name_of, plain
from pytest_llmperf.observe.places import Project
from pytest_llmperf.settings.script_spec import ScriptSpec
from pytest_llmperf.settings.setting import gathered
from pytest_llmperf.support.redaction import redacted, without_secrets
from pytest_llmperf.worker.installed import short_digest
from pytest_llmperf.worker.script.model import Model


def evidence(model: Model, spec: ScriptSpec, project: Project, ranks: int) -> dict[str, Any]:
    """As a record holds it; called once, after all that is timed."""
    whole = model.roots[0] if len(model.roots) == 1 else nn.ModuleList(model.roots)
    modules = list(whole.modules())
    # accelerate wraps optimizers in one of its own.
    optimizers = [each for each in model.optimizers if getattr(each, "optimizer", None) is None]
    optimizers.sort(key=lambda each: (name_of(type(each)), -len(each.param_groups)))
    first = optimizers[0] if optimizers else None
    return gathered(
        {
            "setup": lambda: {"setup": _setup(model, whole, optimizers)},
            "tokens": lambda: {"tokens": "counted" if model.counts_tokens else "unknown"},
            "precision": lambda: {"parameter_dtypes": _dtypes(whole)} | _claimed("autocast_dtype", model.autocast),
            "attention": lambda: _claimed("attention", _attention(whole)),
            "liger": lambda: _liger(whole),
            "compilation": lambda: _twin("compilation").seen_compilation(whole),
            "optimizer": lambda: _twin("optimizer").seen_optimizer(first),
            "recomputation": lambda: _claimed("gradient_checkpointing", any(map(_is_recomputed, modules)) or None),
            "parallelism": lambda: _parallelism(whole, ranks),
            "adapters": lambda: _claimed("adapters", _adapters(modules) or None),
            "command": lambda: {"command": without_secrets(shlex.join(spec.argv)), "env": redacted(spec.env)},
            "sources": lambda: _sources(spec, project),
        }
    )


def _claimed(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: value}


def _twin(setting: str) -> Any:
    """The module that witnesses a setting of a recipe's; another version of torch may not have all that it imports."""
    return import_module(f"pytest_llmperf.worker.settings.{setting}")


def _setup(model: Model, whole: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    found = objects.setup(whole, optimizers[0] if optimizers else None)
    if len(optimizers) > 1:
        found["optimizer"] = {name_of(type(each)): plain(dict(each.defaults)) for each in optimizers}
        found["parameter_groups"] = [group for each in optimizers for group in objects.parameter_groups(each)]
    config = next((each for each in _configs(whole) if hasattr(each, "to_dict")), None)
    if config is not None:
        found["config"] = objects.configuration(config)
    trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    return {
        **found,
        "roots": sorted(name_of(type(root)) for root in model.roots),
        "trained_share": round(trained / max(1, model.num_parameters), 6),
    }


def _configs(whole: nn.Module) -> list[Any]:
    """Of the models of transformers'; their parts share them."""
    configs = (getattr(module, "config", None) for module in whole.modules())
    return [config for config in configs if getattr(config, "_attn_implementation", None)]


def _attention(whole: nn.Module) -> str | None:
    return ", ".join(sorted({str(config._attn_implementation) for config in _configs(whole)})) or None


def _dtypes(whole: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for p in whole.parameters():
        found[str(p.dtype)] = found.get(str(p.dtype), 0) + p.numel()
    return dict(sorted(found.items()))


def _liger(whole: nn.Module) -> dict[str, Any]:
    twin, modules = _twin("liger"), list(whole.modules())
    forwards = twin.liger_forwards(whole)
    owners = {type(module).__module__: module for module in modules}
    functions = {name for module in owners.values() for name in twin.liger_functions(module)}
    return {
        "liger_modules": len(forwards),
        "liger_forwards": sorted(set(forwards)),
        "liger_functions": sorted(functions),
    }


def _is_recomputed(module: nn.Module) -> bool:
    """Whether transformers or torch says so; a script that calls ``checkpoint`` by itself is not seen."""
    return getattr(module, "gradient_checkpointing", False) is True or type(module).__name__ == "CheckpointWrapper"


def _parallelism(whole: nn.Module, ranks: int) -> Any:
    for module in whole.modules():
        stage = getattr(module, "zero_optimization_stage", None)
        if stage is not None:
            return {"world_size": ranks, "parallelism": f"zero-{stage()}"}
        strategy = getattr(module, "sharding_strategy", None) if "FullySharded" in type(module).__name__ else None
        if strategy is not None:
            return {"world_size": ranks, "parallelism": f"fsdp1 {strategy.name.lower()}"}
    return _twin("parallelism").seen_parallelism(whole, ranks)


def _adapters(modules: list[nn.Module]) -> dict[str, Any]:
    """PEFT's, by name: their kind, rank, and which modules have them."""
    found: dict[str, Any] = {}
    for module in modules:
        configs = getattr(module, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, Mapping) else ():
            targets = getattr(config, "target_modules", None) or ()
            found[name] = {
                "kind": type(config).__name__,
                "rank": getattr(config, "r", None),
                "targets": targets if isinstance(targets, str) else sorted(targets),
            }
    return found


def _sources(spec: ScriptSpec, project: Project) -> dict[str, Any]:
    """Digests of the project's own files that were imported, and of those that the user watches."""
    imported = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    # Some modules name a file that there is not.
    files = {name: Path(file) for file in imported if Path(file).is_file() and (name := project.name_of(file))}
    missing = []
    for word in spec.watch:
        there = _named(project.folder, word)
        files |= there
        if not there:
            missing.append(f"watch={word!r} is no file of the command's folder; expected a path as seen from there")
    digests = {name: short_digest(file.read_bytes()) for name, file in sorted(files.items())}
    return {"sources": digests} | ({"remarks": missing} if missing else {})


def _named(folder: Path, word: str) -> dict[str, Path]:
    files = [Path(word)] if Path(word).is_absolute() else folder.glob(word)
    return {Path(os.path.relpath(file, folder)).as_posix(): file for file in files if file.is_file()}
