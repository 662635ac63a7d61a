"""Storages from birth to death, by part: each is recorded as it is made, changes its size, and is let go of."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from pytest_llmperf.worker.estimate.known_outputs import KnownOutputs
from pytest_llmperf.worker.estimate.operator_counter import OperatorCounter
from pytest_llmperf.worker.estimate.quick_mode import DEVICE, QuickMode
from pytest_llmperf.worker.estimate.replay import Change

# Of these operators of FSDP's, the argument that holds gathered weights: as they come, and as they are used.
_GATHERED = {"fsdp::all_gather_copy_in": (1, "all_gather_output"), "fsdp::split_with_sizes_copy": (3, "out")}


@dataclass
class _Living:
    """A storage that lives, and what was recorded of it last."""

    storage: weakref.ref[Any]
    change: Change


class Counter(QuickMode):
    """Records the storages that operators make, by part."""

    def __init__(self, vocabulary_size: int, operators: OperatorCounter | None = None) -> None:
        """``operators`` counts beside it what is called, where anybody wants to know."""
        super().__init__()
        self.operators = operators
        self.part = "weights"
        self.vocabulary_size = vocabulary_size
        self._changes: list[Change] = []
        self._living: dict[int, _Living] = {}
        self._numbers = itertools.count()
        self._known = KnownOutputs()

    def take(self) -> list[Change]:
        """What happened since it was last asked."""
        changes, self._changes = self._changes, []
        return changes

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` unless it is counted; of a tensor in shards, this rank's."""
        storage = on_this_rank(tensor).untyped_storage()
        key = id(storage)
        if key in self._living:
            return

        def gone(_: object) -> None:
            if key in self._living:
                self._record(key, num_bytes=0)
                del self._living[key]

        new = Change(next(self._numbers), 0, self._part_of(tensor))
        self._living[key] = _Living(weakref.ref(storage, gone), new)
        self._record(key, num_bytes=storage.nbytes())

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count the storages of these."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._living[id(storage)] = _Living(weakref.ref(storage), Change(next(self._numbers), 0, "ignored"))

    def times(self, number: int) -> AbstractContextManager[None]:
        """What runs inside is run so often in a step."""
        return self.operators.times(number) if self.operators else nullcontext()

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """See storages change their size: FSDP lets go of weights so, and no operator is called."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            answer = real(storage, num_bytes)
            if id(storage) in self._living:
                self._record(id(storage), num_bytes=num_bytes)
            return answer

        torch.UntypedStorage.resize_ = resize
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = real

    def _record(self, key: int, **changed: Any) -> None:
        living = self._living[key]
        change = living.change._replace(**changed)
        if change != living.change:
            living.change = change
            self._changes.append(change)

    def _part_of(self, tensor: torch.Tensor) -> str:
        if self.part != "weights" and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary_size:
            return "logits"
        # What a backward pass makes in the shape of activations are gradients of activations.
        return "activations" if self.part == "gradients" and tensor.dim() > 2 else self.part  # noqa: PLR2004

    def _as_gathered(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            key = id(tensor.untyped_storage())
            if key in self._living:
                self._record(key, part="gathered")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls, which make nothing
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to this rank's shard
        kwargs = kwargs or {}
        made = self._known.call(function, args, kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        if function.name() in _GATHERED:
            position, name = _GATHERED[function.name()]
            self._as_gathered(kwargs[name] if name in kwargs else args[position])
        return made


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or this rank's shard of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # the shard itself, and not a view that autograd knows
        return tensor.to_local()
