"""Experts: what the model is told to compute them by, what its modules do, and the products that they called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_llmperf.settings.experts import ExpertsEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training

# Whose code chooses among implementations, in a module's forward pass.
_CHOOSES = "transformers.integrations.moe"


def implementation(spec: TrainSpec) -> Mapping[str, Any]:
    return {} if spec.experts == "auto" else {"experts_implementation": spec.experts}


def _mixtures(model: nn.Module) -> list[Any]:
    """The modules that hold a mixture's experts, and are made to run what the configuration names."""

    def chooses(kind: Any) -> bool:
        return getattr(kind.forward, "__globals__", {}).get("__name__") == _CHOOSES

    return [module for module in model.modules() if chooses(type(module))]


def _seen(training: Training) -> ExpertsEvidence:
    if not (mixtures := _mixtures(training.model)):
        return ExpertsEvidence()
    # Liger gives a module a forward pass of its own.
    names = {str(each.config._experts_implementation) for each in mixtures if "forward" not in vars(each)}  # noqa: SLF001
    return ExpertsEvidence(experts=" ".join(sorted(names)))


class Operators(TorchDispatchMode):
    """The names of the operators that are called, each once, while it is ``on``."""

    def __init__(self, *parts: str, on: bool = True) -> None:
        super().__init__()
        self.names: list[str] = []
        self.on, self._parts = on, parts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if self.on and name not in self.names and any(part in name for part in self._parts):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def products_of(model: nn.Module) -> Iterator[list[str]]:
    """The products of matrices that a mixture's experts call in here."""
    with Operators("mm", on=False) as called:
        hooks = []
        for module in _mixtures(model):
            hooks.append(module.register_forward_pre_hook(lambda *_: setattr(called, "on", True)))
            hooks.append(module.register_forward_hook(lambda *_: setattr(called, "on", False)))
        try:
            yield called.names
        finally:
            for hook in hooks:
                hook.remove()


WITNESSES = {"experts": lambda *_: _seen}
