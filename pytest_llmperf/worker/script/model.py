"""The models that a user's own training trains, found among the objects of its process, and their tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pytest_llmperf.observe.objects import numel

# DeepSpeed's.
_SCALERS = ("LossScaler", "DynamicLossScaler")


class Model:
    """What trains here: modules that are part of no other, with parameters that an optimizer has."""

    def __init__(
        self, roots: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], *, scales_losses: bool
    ) -> None:
        """``scales_losses``: something of its own multiplies them, so that nobody here knows them."""
        self.roots, self.optimizers, self.scales_losses = roots, optimizers, scales_losses
        self._tokens = 0
        self.counts_tokens = False
        self.autocast: str | None = None
        """The type to which a forward pass casts, empty: to none; ``None``: nobody could see it."""
        self.leave: Callable[[], None] = lambda: None
        """Listen no more."""
        self._listen()

    @classmethod
    def found(cls, before: Model | None = None) -> Model:
        """By one walk over all objects; what counts tokens listens from now on, and no more to that of ``before``."""
        if before:
            before.leave()
        modules, optimizers, scales_losses = list[nn.Module](), list[torch.optim.Optimizer](), False
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, nn.Module):
                modules.append(thing)
            elif issubclass(kind, torch.optim.Optimizer) and getattr(thing, "param_groups", None):
                optimizers.append(thing)
            elif kind.__name__ in _SCALERS:
                scales_losses = scales_losses or getattr(thing, "cur_scale", 1) != 1
        children = {id(child) for module in modules for child in module.children()}
        roots = [each for each in modules if id(each) not in children]
        # Some optimizers have flat copies of parameters: then what asks for gradients is what trains.
        held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        trained = [root for root in roots if any(id(p) in held for p in root.parameters())]
        asking = [root for root in roots if any(p.requires_grad for p in root.parameters())]
        return cls(trained or asking, optimizers, scales_losses=scales_losses)

    def tokens(self) -> int:
        """Of the forward passes since this was asked last."""
        found, self._tokens = self._tokens, 0
        return found

    def _listen(self) -> None:
        """At the widest embedding of the models that train; where it is compiled, at the compiled module's own call."""
        embeddings = [m for root in self.roots for m in root.modules() if isinstance(m, nn.Embedding)]
        if not embeddings:
            return
        widest = max(embeddings, key=lambda each: each.num_embeddings)
        compiled = next((each for root in self.roots for each in root.modules() if _is_compiled(each, widest)), None)
        if compiled is not None and not hasattr(compiled, "_orig_mod"):
            self._listen_to(compiled)
            return
        module = widest if compiled is None else compiled  # not by truth: that may be a length, which it has none of
        self.leave = module.register_forward_pre_hook(self._called, with_kwargs=True).remove

    def _listen_to(self, compiled: nn.Module) -> None:
        """One that was compiled in place: a hook of its own would be compiled with it."""
        call: Any = compiled._compiled_call_impl

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._called(compiled, args, kwargs)
            return call(*args, **kwargs)

        def leave() -> None:
            compiled._compiled_call_impl = call

        compiled._compiled_call_impl, self.leave = counted, leave

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # what is compiled with us in it would be compiled anew at each count
        given = (kwargs.get("input_ids"), *args, *kwargs.values())
        ids = next((one for one in given if isinstance(one, torch.Tensor) and not one.is_floating_point()), None)
        if ids is not None and module.training and torch.is_grad_enabled():
            self._tokens += ids.numel()
            if not self.counts_tokens:
                self.counts_tokens, self.autocast = True, _autocast(ids.device.type)

    @property
    def num_parameters(self) -> int:
        return sum(numel(p) for root in self.roots for p in root.parameters())


def _is_compiled(module: nn.Module, part: nn.Module) -> bool:
    """Whether ``part`` is run by what ``module`` was compiled to."""
    is_compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    return is_compiled and any(each is part for each in module.modules())


def _autocast(device_type: str) -> str:
    return str(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else ""
