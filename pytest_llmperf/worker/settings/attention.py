"""Attention: which implementations a model has, PyTorch's kernels for it, and the operators that it called; with the
products that a mixture's experts called, what they are told to be computed by, and what their modules do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Trainer

from pytest_llmperf.observe.device import SDPA_SWITCHES, matmul_precision, sdpa_kernels
from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.attention import ATTENTIONS, FLASH, UNKNOWN, ExpertsEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training
from pytest_llmperf.worker.settings.parallelism import is_sharded

# An attention, and the class attribute by which a family says that it has it.
_SAID_BY = {
    "sdpa": "_supports_sdpa",
    **dict.fromkeys(FLASH, "_supports_flash_attn"),
    "flex_attention": "_supports_flex_attn",
}


def transformers_version() -> str:
    return f"transformers {version('transformers')}"


def attentions_of(kind: type) -> tuple[str, ...]:
    """The attentions that the model class ``kind`` says it has; one that says nothing is taken to have it."""
    found = ("eager", *(name for name, said in _SAID_BY.items() if getattr(kind, said, True)))
    # Where a class lists kernels of its own, transformers takes one of them in the place of what was asked for.
    own = getattr(kind, "_compatible_flash_implementations", None) or found
    return tuple(name for name in ATTENTIONS if name in found and (name not in FLASH or name in own))


def check_attention(kind: type, hf_config: Any, asked: str) -> None:
    """Raise a ``RefusedError`` where the model class ``kind`` does not have the attention that was asked for."""
    there = attentions_of(kind)
    if asked in there:
        return
    if there == ("eager",) and not hasattr(hf_config, "num_attention_heads"):
        raise RefusedError(
            f"{hf_config.model_type} has no attention at all, and attention={asked!r} nothing to replace; "
            "expected 'eager', which leaves a model as it is: use attention='eager'"
        )
    known = ", ".join(repr(one) for one in there)
    raise RefusedError(
        f"{hf_config.model_type} has no attention={asked!r} in {transformers_version()}, expected "
        f"{'one of ' if len(there) > 1 else ''}{known}: use attention='eager'"
    )


@cache
def found_settings() -> Mapping[str, Any]:
    """What the user's environment has set of all that a launch forces; asked before the first time that it does."""
    return {"sdpa_kernels": sdpa_kernels(), "matmul_precision": matmul_precision()}


def choose_sdpa(spec: TrainSpec) -> None:
    """Leave PyTorch's attention only the kernel asked for; ``auto`` leaves it those that this environment has."""
    wanted = found_settings()["sdpa_kernels"] if spec.sdpa_backend == "auto" else [spec.sdpa_backend]
    for name, switch in SDPA_SWITCHES.items():
        if (name in wanted) != (name in sdpa_kernels()):
            switch(name in wanted)


# Whose code chooses among experts' implementations, in a module's forward pass.
_CHOOSES = "transformers.integrations.moe"


def experts_implementation(spec: TrainSpec) -> Mapping[str, Any]:
    return {} if spec.experts == "auto" else {"experts_implementation": spec.experts}


def _mixtures(model: nn.Module) -> list[Any]:
    """The modules that hold a mixture's experts, and are made to run what the configuration names."""
    return [m for m in model.modules() if getattr(type(m).forward, "__globals__", {}).get("__name__") == _CHOOSES]


def _seen_experts(training: Training) -> ExpertsEvidence:
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


def last_kernels(trainer: Trainer, model: PreTrainedModel) -> dict[str, str]:
    """The operators of attention that one more sequence calls, after all steps (empty: matrix products), and of
    experts if any. ``unknown``: it failed, or flex_attention would compile anew, or a sharded model's ranks wait."""
    unknown = {"attention_kernel": UNKNOWN}
    if model.config._attn_implementation == "flex_attention" or is_sharded(model):
        return unknown
    inputs = {name: value.unsqueeze(0).to(model.device) for name, value in trainer.train_dataset[0].items()}
    try:
        with trainer.accelerator.autocast(), Operators("attention", "flash") as ops, products_of(model) as products:
            model(**inputs)
    except Exception:  # noqa: BLE001 - whatever stands in the way, the measurement is done and counts
        return unknown
    return {"attention_kernel": " ".join(ops.names)} | ({"experts_kernel": " ".join(products)} if products else {})


WITNESSES = {
    "attention": lambda *_: lambda training: {"attention": str(training.model.config._attn_implementation)},
    "experts": lambda *_: _seen_experts,
}
