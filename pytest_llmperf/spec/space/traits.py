"""Traits: of a spec what may make it fast, one by one, as a model of many configurations counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llmperf.spec.choices import LIGER_KERNELS
from pytest_llmperf.spec.space.default_axes import liger_kernels
from pytest_llmperf.spec.train_spec import TrainSpec

#: The one trait that is a number, and its measure.
SIZE = "micro_batch_size"

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
