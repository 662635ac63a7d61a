"""The axes of a model of which nobody has said what may change: what makes training faster and not different."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_llmperf.settings.batch import AXIS as SIZES
from pytest_llmperf.settings.liger import LIGER_KERNELS, LOSS, liger_kernels
from pytest_llmperf.settings.optimizer import RUNNABLE_OPTIMIZERS
from pytest_llmperf.settings.precision import PRECISIONS
from pytest_llmperf.settings.registry import SETTINGS
from pytest_llmperf.settings.setting import Axis, Choice, Search, SpecError
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.suggestions import hint

#: What ``allowed`` may name: of these trainings none need learn as the others do.
ALLOWED = (*PRECISIONS, "fp8", *RUNNABLE_OPTIMIZERS)


def default_axes(
    base: TrainSpec,
    *,
    on_cpu: bool,
    fixed: Iterable[str] = (),
    allowed: Iterable[str] = (),
    global_batch: int | None = None,
) -> tuple[Axis, ...]:
    """What may change of ``base`` on ``base.gpus`` GPUs.

    ``fixed``: fields that stay as they are, with all that is decided together with them. ``allowed``: trainings beside
    its own, by the words of ``ALLOWED``. ``global_batch``: sequences of all ranks for one step, by accumulation; left
    out, a step may have as many as fit.

    Raises:
        SpecError: an unknown word in ``allowed``, or a global batch that these GPUs cannot share.
    """
    words = tuple(dict.fromkeys(allowed))
    for word in words:
        if word not in ALLOWED:
            raise SpecError(f"allowed {word!r}{hint(word, ALLOWED)}; known: precisions, fp8 and names of optimizers")
    search = Search(on_cpu, words, frozenset(fixed), global_batch)
    axes = (axis for setting in SETTINGS if (axis := setting.axis(base, search)) is not None)
    # Sizes have to be decided even where there is one: accumulation makes up for what a micro-batch lacks.
    return tuple(
        axis
        for axis in axes
        if (len(axis.choices) > 1 and not axis.fields & search.fixed)
        or (axis.name == SIZES and global_batch is not None)
    )


# Traits: of a spec what may make it fast, one by one, as a model of many configurations counts them.


# How long to measure says nothing, and what goes along with another trait nothing new.
_NO_TRAIT = frozenset(
    "model steps min_steps warmup_steps throughput_tolerance memory_tolerance gradient_accumulation_steps liger "
    "liger_kernels".split()
)


def traits(specs: Sequence[TrainSpec]) -> tuple[Mapping[str, Any], ...]:
    """Of each spec its traits; only those in which ``specs`` differ. Liger's kernels are one trait each."""
    found = [_traits(spec) for spec in specs]
    varying = [name for name in found[0] if len({str(one[name]) for one in found}) > 1] if found else []
    return tuple({name: one[name] for name in varying} for one in found)


def _traits(spec: TrainSpec) -> dict[str, Any]:
    values = {name: value for name, value in spec.to_dict().items() if name not in _NO_TRAIT}
    kernels = spec.liger_kernels.split("+") if spec.liger_kernels != "all" else liger_kernels(spec)
    values["liger"] = spec.liger
    return values | {f"liger {name}": spec.liger and name in kernels for name in LIGER_KERNELS}


# Recipes: choices that do well together wherever they were tried, which a search tries before it knows anything.


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
