"""What a step runs, by name: operators, the kernels of Liger that it launches, and FLOPs, counted on fake tensors."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from pytest_llmperf.worker.estimate.arithmetic import Arithmetic
from pytest_llmperf.worker.estimate.quick_mode import DEVICE, QuickMode

# What asks for a tensor's kind, and makes none: how often depends on who looks. The content of a fake tensor is known
# where it is the host's own (an optimizer's count of its steps), for which nobody waits.
_QUESTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense dim is_contiguous is_non_overlapping_and_dense is_same_size is_strides_like_format layout "
        "numel size storage_offset stride sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride"
    ).split()
)


class OperatorCounter:
    """Counts while one of its ``times`` is open."""

    def __init__(self, *, traffic: bool = False) -> None:
        """``traffic``: bytes are counted too, which takes its time."""
        self.operators: collections.Counter[str] = collections.Counter()
        """Without the names of their overloads, ``aten::mm`` say; Liger's kernels as ``liger::…``."""
        self.flops: collections.Counter[str] = collections.Counter()
        """By operator."""
        self.traffic: collections.Counter[str] = collections.Counter()
        """Bytes of tensors that each operator reads and writes, where that was asked for; of views and of Liger's
        kernels none."""
        self._counts_traffic = traffic
        self._now: collections.Counter[str] | None = None

    def called(self, name: str) -> None:
        """``name`` was called where no dispatcher sees it."""
        if self._now is not None:
            self._now[name] += 1

    @contextmanager
    def times(self, number: int) -> Iterator[None]:
        """What runs inside is run so often in a step."""
        self._now = collections.Counter()
        traffic: collections.Counter[str] = collections.Counter()
        with Arithmetic() as arithmetic, _Mode(self._now, traffic if self._counts_traffic else None):
            yield
        totals = (self.operators, self._now), (self.flops, arithmetic.by_operator), (self.traffic, traffic)
        for total, counts in totals:
            for name, count in counts.items():
                total[name] += count * number
        self._now = None


class _Mode(QuickMode):
    """Sees each operator below autograd before any other mode does."""

    supports_higher_order_operators = True

    def __init__(self, counts: collections.Counter[str], traffic: collections.Counter[str] | None) -> None:
        super().__init__()
        self._counts, self._traffic = counts, traffic

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls, and nothing that a device does
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to this rank's shard
        name = function.name().partition(".")[0]
        if name not in _QUESTIONS and not name.startswith(("prim::", "profiler::")):
            self._counts[name] += 1
        if self._traffic is None or function.is_view:
            return function(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        self._traffic[name] += _bytes_of(args) + _bytes_of(result)
        return result


def _bytes_of(values: Any) -> int:
    """Of the tensors in ``values``."""
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    return sum(map(_bytes_of, values)) if isinstance(values, list | tuple) else 0
