"""Recipes: choices that do well together wherever they were tried, which a search tries before it knows anything.

Two of them, as Liger's fused kernels and a compiler that fuses the rest itself may be worth nothing together: what each
choice brings alone does not say which of the two is the better one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_llmperf.spec.space.axis import Axis, Choice
from pytest_llmperf.spec.space.default_axes import LOSS, liger_kernels
from pytest_llmperf.spec.train_spec import TrainSpec

_FUSED_STEP: Mapping[str, Any] = {"optimizer": "adamw_torch_fused"}
_ALL_KERNELS: Mapping[str, Any] = {"liger": True, "liger_kernels": "all"}
_LOSS_ALONE: Mapping[str, Any] = {"liger": True, "liger_kernels": LOSS}
_LAYERS: Mapping[str, Any] = {
    "torch_compile": True,
    "torch_compile_scope": "layers",
    "torch_compile_mode": "default",
}


def recipes(base: TrainSpec) -> tuple[Mapping[str, Any], ...]:
    """Of a model like ``base``'s: fields of a TrainSpec."""
    if not liger_kernels(base):
        return ({**_LAYERS, **_FUSED_STEP},)
    return ({**_ALL_KERNELS, **_FUSED_STEP}, {**_LAYERS, **_LOSS_ALONE, **_FUSED_STEP})


def followed(recipe: Mapping[str, Any], axes: Sequence[Axis], first: Sequence[Choice]) -> tuple[Choice, ...]:
    """Of each axis the choice that ``recipe`` makes; where it makes none that there is, what ``first`` has."""
    return tuple(next(_agreeing(recipe, axis), own) for axis, own in zip(axes, first, strict=True))


def _agreeing(recipe: Mapping[str, Any], axis: Axis) -> Iterator[Choice]:
    for choice in axis.choices:
        told = [recipe[name] == value for name, value in choice.fields if name in recipe]
        if told and all(told):
            yield choice
