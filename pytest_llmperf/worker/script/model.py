"""The models that a user's own training trains, found among the objects of its process: their tokens, and evidence.

Evidence is the same in two launches of one command: no addresses, and files by their names in the project. What cannot
be known of a script is not claimed. A collector that fails takes nothing from the measurement."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_llmperf.observe.environment import Project, configuration, name_of, numel, parameter_groups, plain, setup
from pytest_llmperf.settings.setting import gathered, stored_evidence
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.support.redaction import redacted, without_secrets
from pytest_llmperf.worker.imports import patched_files, short_digest
from pytest_llmperf.worker.settings.optimizer import seen_optimizer

_TWICE = "the model takes the same ids twice in a backward pass, and they are counted once; tokens= says otherwise"
# DeepSpeed's.
_SCALERS = ("LossScaler", "DynamicLossScaler")


class Model:
    """What trains here: modules that are part of no other, with parameters that an optimizer has."""

    def __init__(
        self, roots: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], *, scales_losses: bool
    ) -> None:
        """``scales_losses``: something of its own multiplies them, so that nobody here knows them."""
        self.roots, self.optimizers, self.scales_losses = roots, optimizers, scales_losses
        self._taken = defaultdict[nn.Module, list[tuple[object, int]]](list)  # batches of the pass that comes
        self.counts_tokens = self.repeats_ids = False
        self.autocast: str | None = None
        """The type to which a forward pass casts, empty: to none; ``None``: nobody could see it."""
        self.leave: Callable[[], None] = lambda: None
        self._listen()

    @classmethod
    def found(cls) -> Model:
        """By one walk over all objects; what counts tokens listens from now on."""
        things = gc.get_objects()
        modules = [thing for thing in things if issubclass(type(thing), nn.Module)]
        optimizers = [thing for thing in things if issubclass(type(thing), torch.optim.Optimizer)]
        optimizers = [each for each in optimizers if getattr(each, "param_groups", None)]
        scales_losses = any(type(one).__name__ in _SCALERS and getattr(one, "cur_scale", 1) != 1 for one in things)
        children = {id(child) for module in modules for child in module.children()}
        roots = [each for each in modules if id(each) not in children]
        # Some optimizers have flat copies of parameters: then what asks for gradients is what trains.
        held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        trained = [root for root in roots if any(id(p) in held for p in root.parameters())]
        asking = [root for root in roots if any(p.requires_grad for p in root.parameters())]
        return cls(trained or asking, optimizers, scales_losses=scales_losses)

    def tokens(self) -> int:
        """Of the forward passes since this was asked last; an embedding of positions takes them once for all rows."""
        found, self._taken = self._taken, defaultdict(list)
        taken = max(found.values(), key=lambda batches: sum(dict(batches).values()), default=[])
        batches = dict(taken)  # a second call with one, as of a reference, takes no second batch
        self.repeats_ids |= len(batches) < len(taken)
        return sum(batches.values())

    def _listen(self) -> None:
        """At embeddings of the models that train, as wide as the one of the most ids; where that is compiled, at the
        compiled module's own call."""
        modules = dict.fromkeys(each for root in self.roots for each in root.modules())
        if not (embeddings := [each for each in modules if isinstance(each, nn.Embedding)]):
            return
        largest = max(embeddings, key=lambda each: each.num_embeddings)
        whole = [each for each in modules if hasattr(each, "_orig_mod") or each._compiled_call_impl is not None]
        within = {part: next((one for one in whole if part in {*one.modules()}), None) for part in embeddings}
        compiled = within[largest]
        if compiled is None or hasattr(compiled, "_orig_mod"):
            alike = [one for one in embeddings if one.embedding_dim == largest.embedding_dim and within[one] is None]
            hooks = ExitStack()
            for each in alike if compiled is None else [compiled]:
                hooks.enter_context(each.register_forward_pre_hook(self._called, with_kwargs=True))
            self.leave = hooks.close
            return
        # It was compiled in place: a hook of its own would be compiled with it.
        call: Any = compiled._compiled_call_impl

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._called(compiled, args, kwargs)
            return call(*args, **kwargs)

        compiled._compiled_call_impl, self.leave = counted, partial(setattr, compiled, "_compiled_call_impl", call)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # what is compiled with us in it would be compiled anew at each count
        given = (kwargs.get("input_ids"), *args, *kwargs.values())
        ids = next((one for one in given if isinstance(one, torch.Tensor) and not one.is_floating_point()), None)
        if ids is not None and module.training and torch.is_grad_enabled():
            self._taken[module].append((_identity(ids), ids.numel()))
            if not self.counts_tokens:
                self.counts_tokens, kind = True, ids.device.type
                self.autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""


def _identity(ids: torch.Tensor) -> object:
    """That of what ``ids`` holds, without keeping its memory; one of its own where that has none, as under vmap."""
    try:
        storage = StorageWeakRef(ids.untyped_storage())
        return storage, ids.storage_offset(), ids.shape, ids.stride(), 0 if ids.is_inference() else ids._version  # noqa: SLF001
    except RuntimeError:
        return object()


def evidence(model: Model, spec: ScriptSpec, project: Project, ranks: int) -> dict[str, Any]:
    """As a record holds it; called once, after all that is timed."""
    model.leave()  # how tokens were counted is no part of what trained
    whole = model.roots[0] if len(model.roots) == 1 else nn.ModuleList(model.roots)
    # accelerate wraps optimizers in one of its own.
    own = (each for each in model.optimizers if getattr(each, "optimizer", None) is None)
    optimizers = sorted(own, key=lambda each: (name_of(type(each)), -len(each.param_groups)))
    found = gathered(
        {
            "setup": lambda: {"setup": _setup(model, whole, optimizers)},
            "precision": lambda: {"parameter_dtypes": dict(sorted(_twin("precision").parameter_dtypes(whole).items()))},
            "liger": lambda: _liger(whole),
            "compilation": lambda: _twin("compilation").seen_compilation(whole),
            "optimizer": lambda: seen_optimizer(optimizers[0] if optimizers else None),
            "parallelism": lambda: {"world_size": ranks, **_parallelism(whole, ranks)},
            "modules": lambda: _of_modules(whole),
            "sources": lambda: _sources(spec, project),
        }
    )
    found["setup"] = {**found.get("setup", {}), "sources": found.pop("sources", {})}
    found |= {} if model.autocast is None else {"autocast_dtype": model.autocast}
    if model.repeats_ids and spec.given_tokens is None:
        found["remarks"] = [*found.get("remarks", ()), _TWICE]
    said = {"command": without_secrets(shlex.join(spec.argv)), "env": redacted(spec.env)}
    return {**found, **said, "tokens": "counted" if model.counts_tokens else "unknown"}


def _twin(setting: str) -> Any:
    """The module that witnesses a setting of a recipe's; another version of torch may not have all that it imports."""
    return import_module(f"pytest_llmperf.worker.settings.{setting}")


def _setup(model: Model, whole: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    found = setup(whole, optimizers[0] if optimizers else None, {})
    if len(optimizers) > 1:
        found["optimizer"] = {name_of(type(each)): plain(dict(each.defaults)) for each in optimizers}
        found["parameter_groups"] = [group for each in optimizers for group in parameter_groups(each)]
    number = max(1, sum(map(numel, whole.parameters())))
    configs = [configuration(config) for config in _configs(whole)[:1]]
    return {
        **found,
        **({"config": configs[0]} if configs else {}),
        "patched": patched_files(),
        "roots": sorted(name_of(type(root)) for root in model.roots),
        "trained_share": round(sum(numel(p) for p in whole.parameters() if p.requires_grad) / number, 6),
    }


def _configs(whole: nn.Module) -> list[Any]:
    """Of the models of transformers'; their parts share them."""
    configs = (getattr(module, "config", None) for module in whole.modules())
    return [config for config in configs if getattr(config, "_attn_implementation", None)]


def _liger(whole: nn.Module) -> dict[str, Any]:
    twin = _twin("liger")
    forwards = twin.liger_forwards(whole)
    owners = {type(module).__module__: module for module in whole.modules()}
    functions = sorted({name for module in owners.values() for name in twin.liger_functions(module)})
    return {"liger_modules": len(forwards), "liger_forwards": sorted(set(forwards)), "liger_functions": functions}


def _of_modules(whole: nn.Module) -> dict[str, Any]:
    """What some modules say of themselves, and nothing where none does."""
    found: dict[str, Any] = {}
    if attentions := sorted({str(config._attn_implementation) for config in _configs(whole)}):
        found["attention"] = ", ".join(attentions)
    for module in whole.modules():
        # A script that calls torch's ``checkpoint`` by itself is not seen.
        if type(module).__name__ == "CheckpointWrapper" or getattr(module, "gradient_checkpointing", False) is True:
            found["gradient_checkpointing"] = True
        adapters = getattr(module, "peft_config", None)
        for name, config in adapters.items() if isinstance(adapters, Mapping) else ():
            targets = getattr(config, "target_modules", None) or ()
            about = f"{type(config).__name__} rank={getattr(config, 'r', None)}"
            targets = targets if isinstance(targets, str) else " ".join(sorted(targets))
            found.setdefault("adapters", {})[name] = f"{about} of {targets}"
    return found


def _parallelism(whole: nn.Module, ranks: int) -> Mapping[str, Any]:
    for module in whole.modules():
        if hasattr(module, "zero_optimization_stage"):
            return {"parallelism": f"zero-{module.zero_optimization_stage()}"}
        if type(module).__name__ == "FullyShardedDataParallel":
            return {"parallelism": f"fsdp1 {module.sharding_strategy.name.lower()}"}
    seen = stored_evidence(_twin("parallelism").seen_parallelism(whole, ranks))
    # FSDP's own dimensions have no other word; what else weights are spread over does, as context or tensor parallel.
    states = (get() for each in whole.modules() if (get := getattr(each, "_get_fsdp_state", None)))
    groups = (getattr(state, "_fsdp_param_group", None) for state in states)
    own = {*chain.from_iterable(group.mesh_info.mesh.mesh_dim_names or () for group in groups if group is not None)}
    meshes = {parameter.device_mesh for parameter in whole.parameters() if hasattr(parameter, "device_mesh")}
    named = {(name, mesh.size(at)) for mesh in meshes for at, name in enumerate(mesh.mesh_dim_names or ())}
    others = sorted(f"{name} {size}" for name, size in named if size > 1 and (name not in own or "cp" in name))
    if not others:
        return seen
    base = "fsdp_hybrid" if sum(size > 1 for name, size in named if name in own) > 1 else "fsdp"
    return {**seen, "parallelism": " ".join([*([base] if own else []), *others])}


def _sources(spec: ScriptSpec, project: Project) -> dict[str, Any]:
    """Digests of the project's own files that were imported, and of those that the user watches."""
    imported = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {name: Path(file) for file in filter(None, imported) if (name := project.name_of(str(file)))}
    missing = []
    for word in spec.watch:
        watched = [Path(word)] if Path(word).is_absolute() else project.folder.glob(word)
        there = {os.path.relpath(file, project.folder): file for file in watched if file.is_file()}
        files |= there
        if not there:
            missing.append(f"watch={word!r} is no file of the command's folder; expected a path as seen from there")
    digests = {name: short_digest(file.read_bytes()) for name, file in sorted(files.items()) if file.is_file()}
    return {"sources": digests} | ({"remarks": missing} if missing else {})
