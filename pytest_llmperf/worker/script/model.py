"""The models that a user's own training trains, found among the objects of its process, and their tokens."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Model:
    """What trains here: modules that are part of no other, with parameters that ask for gradients."""

    roots: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    _tokens: list[int] = field(default_factory=list)
    _is_counted: bool = False
    autocast: str | None = None
    """The type to which a forward pass casts, empty: to none; ``None``: nobody could see it."""

    @classmethod
    def found(cls) -> Model:
        """By one walk over all objects; what counts tokens listens from now on."""
        modules, optimizers = list[nn.Module](), list[torch.optim.Optimizer]()
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, nn.Module):
                modules.append(thing)
            elif issubclass(kind, torch.optim.Optimizer) and getattr(thing, "param_groups", None):
                optimizers.append(thing)
        children = {id(child) for module in modules for child in module.children()}
        roots = [each for each in modules if id(each) not in children]
        trained = [root for root in roots if any(p.requires_grad for p in root.parameters())]
        model = cls(trained, optimizers)
        model._listen()
        return model

    def tokens(self) -> int:
        """Of the forward passes since this was asked last."""
        found = sum(self._tokens)
        self._tokens.clear()
        return found

    @property
    def counts_tokens(self) -> bool:
        return self._is_counted

    def _listen(self) -> None:
        """At the widest embedding of the models that train; where it is compiled, at the compiled model's own call."""
        embeddings = [m for root in self.roots for m in root.modules() if isinstance(m, nn.Embedding)]
        if not embeddings:
            return
        widest = max(embeddings, key=lambda each: each.num_embeddings)
        compiled = next(self._compiled_around(widest), None)
        if compiled is None:
            widest.register_forward_pre_hook(self._embedded)
        else:
            compiled.register_forward_pre_hook(self._called, with_kwargs=True)

    def _compiled_around(self, module: nn.Module) -> Iterator[nn.Module]:
        for root in self.roots:
            for each in root.modules():
                if hasattr(each, "_orig_mod") and any(one is module for one in each.modules()):
                    yield each

    def _embedded(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and module.training and torch.is_grad_enabled():
            self._is_counted = True
            self._tokens.append(args[0].numel())
            if self.autocast is None:
                self.autocast = _autocast(args[0].device.type)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [kwargs.get("input_ids"), *args]
        ids = next((one for one in given if isinstance(one, torch.Tensor) and not one.is_floating_point()), None)
        if ids is not None and module.training and torch.is_grad_enabled():
            self._is_counted = True
            self._tokens.append(ids.numel())

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for root in self.roots for p in root.parameters())


def _autocast(device_type: str) -> str:
    return str(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else ""
