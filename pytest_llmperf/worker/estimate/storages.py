"""Storages: recorded on fake tensors from birth to death, and replayed for a few steps by an allocator like CUDA's.

After PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``, for one stream: the smallest free block that is large enough is
taken, split where what is left over is worth it, and merged with its free neighbours when it is given back."""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from pytest_llmperf.worker.estimate.arithmetic import DEVICE, QuickMode, replaced
from pytest_llmperf.worker.estimate.exchanges import OperatorCounter

# Of these operators of FSDP's, the argument that holds gathered weights: as they come, and as they are used.
_GATHERED = {"fsdp::all_gather_copy_in": (1, "all_gather_output"), "fsdp::split_with_sizes_copy": (3, "out")}


class StorageCounter(QuickMode):
    """Records storages by part: as operators make them, as they change their size, and as they are let go of."""

    def __init__(self, vocabulary_size: int, operators: OperatorCounter | None = None) -> None:
        """``operators`` counts beside it what is called, where anybody wants to know."""
        super().__init__()
        self.operators = operators
        self.part = "weights"
        self.vocabulary_size = vocabulary_size
        self._changes: list[Change] = []
        self._living: dict[int, tuple[weakref.ref[Any], Change]] = {}  # and what was recorded of it last
        self._numbers = itertools.count()

    def take(self) -> list[Change]:
        """What happened since it was last asked."""
        changes, self._changes = self._changes, []
        return changes

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` unless it is counted or a mere shape; of one in shards, this rank's."""
        storage = on_this_rank(tensor).untyped_storage()
        key = id(storage)
        if key in self._living or tensor.device.type == "meta":
            return

        def gone(_: object) -> None:
            if key in self._living:
                self._record(key, num_bytes=0)
                del self._living[key]

        self._living[key] = weakref.ref(storage, gone), Change(next(self._numbers), 0, self._part_of(tensor))
        self._record(key, num_bytes=storage.nbytes())

    def count_weights(self, model: torch.nn.Module) -> None:
        self.part = "weights"
        for tensor in (*model.parameters(), *model.buffers()):
            self.count(tensor)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._living[id(storage)] = weakref.ref(storage), Change(next(self._numbers), 0, "ignored")

    def called(self, name: str) -> None:
        if self.operators is not None:
            self.operators.called(name)

    def times(self, number: int) -> AbstractContextManager[None]:
        return self.operators.times(number) if self.operators else nullcontext()

    def resizing(self) -> AbstractContextManager[None]:
        """See storages change their size: FSDP lets go of weights so, and no operator is called."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            answer = real(storage, num_bytes)
            if id(storage) in self._living:
                self._record(id(storage), num_bytes=num_bytes)
            return answer

        return replaced(torch.UntypedStorage, resize_=resize)

    def _record(self, key: int, **changed: Any) -> None:
        storage, before = self._living[key]
        if (change := before._replace(**changed)) != before:
            self._living[key] = storage, change
            self._changes.append(change)

    def _part_of(self, tensor: torch.Tensor) -> str:
        if self.part != "weights" and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary_size:
            return "logits"
        # What a backward pass makes in the shape of activations are gradients of activations.
        return "activations" if self.part == "gradients" and tensor.dim() > 2 else self.part  # noqa: PLR2004

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls, which make nothing
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to this rank's shard
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if self.operators is not None and function.namespace in ("c10d", "_c10d_functional"):
            self.operators.exchanges.saw(function, (*args, made))  # one of them is the whole
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        if function.name() in _GATHERED:
            position, name = _GATHERED[function.name()]
            for tensor in tree_leaves(kwargs[name] if name in kwargs else args[position]):
                if id(tensor.untyped_storage()) in self._living:
                    self._record(id(tensor.untyped_storage()), part="gathered")
        return made


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or this rank's shard of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # the shard itself, and not a view that autograd knows
        return tensor.to_local()


_MIB = 2**20
GRANULE = 512  # the least that a block grows by
# What is at most as large lives in segments of its own kind, which are split down to the granule. Elsewhere what is
# left over is split off only if it is larger than this: else it stays a part of the block, and counts.
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
# Segments for what is larger, up to a limit beyond which each gets one of its own, in whole steps.
_LARGE_SEGMENT, _OWN_SEGMENT, _STEP = 20 * _MIB, 10 * _MIB, 2 * _MIB
# So far apart lie segments that no two of them touch.
_APART = 2**48


def whole(num_bytes: int, granule: int = GRANULE) -> int:
    return -(-num_bytes // granule) * granule


class Block(NamedTuple):
    size: int
    address: int
    is_small: bool


class CachingAllocator:
    """One GPU's memory, which never ends."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._num_segments = 0
        # By kind of segment, in the order of size, then address: as it looks for the best fit.
        self._free: dict[bool, list[Block]] = {True: [], False: []}
        # The same by where each begins and ends.
        self._from: dict[int, Block] = {}
        self._to: dict[int, Block] = {}

    def allocate(self, num_bytes: int) -> Block:
        size = max(GRANULE, whole(num_bytes))
        is_small = size <= _SMALL
        at = bisect.bisect_left(self._free[is_small], (size, 0))
        if at < len(self._free[is_small]):
            block = self._taken(self._free[is_small][at])
        else:
            large = _LARGE_SEGMENT if size < _OWN_SEGMENT else whole(size, _STEP)
            self._num_segments += 1
            block = Block(_SMALL_SEGMENT if is_small else large, self._num_segments * _APART, is_small)
            self.reserved_bytes += block.size
        rest = block.size - size
        if rest >= GRANULE if is_small else rest > _SMALL:
            self._keep(Block(rest, block.address + size, is_small))
            block = block._replace(size=size)
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        after, before = self._from.get(block.address + block.size), self._to.get(block.address)
        if after is not None:
            block = block._replace(size=block.size + self._taken(after).size)
        if before is not None:
            block = block._replace(size=block.size + self._taken(before).size, address=before.address)
        self._keep(block)

    def _keep(self, block: Block) -> None:
        bisect.insort(self._free[block.is_small], block)
        self._from[block.address] = self._to[block.address + block.size] = block

    def _taken(self, block: Block) -> Block:
        free = self._free[block.is_small]
        del free[bisect.bisect_left(free, block)], self._from[block.address], self._to[block.address + block.size]
        return block


class Change(NamedTuple):
    """From now on, storage ``number`` has so many bytes, and is of this part. None: it is gone."""

    number: int
    num_bytes: int
    part: str


@dataclass(frozen=True)
class Recording:
    model: Sequence[Change]
    first_update: Sequence[Change]
    """The optimizer's first step, which makes its states."""
    micro_batches: Sequence[Change]
    """Forward and backward passes; what is left at the end is let go of after the update."""
    update: Sequence[Change]
    pieces: Mapping[int, int] = field(default_factory=dict)
    """In how many equal ones the optimizer makes what has so many bytes and is recorded as one."""


# The first step finds nothing but weights, the second one what the first has left in pieces; no later one takes more.
_STEPS = 2

# Never a storage's number.
_WORKSPACE = -1


def parts_at_peak(recording: Recording, workspaces: Sequence[int] = ()) -> dict[str, int]:
    """Bytes by part where most is allocated; ``workspaces``: the matrix library's; ``rounding``: the blocks'."""
    replay = _Replay()
    replay.run(recording.model)
    replay.run(Change(_WORKSPACE - at, size, "workspace") for at, size in enumerate(workspaces))
    for step in range(_STEPS):
        replay.run(recording.micro_batches)
        replay.run(recording.update if step else recording.first_update, recording.pieces)
        replay.run(Change(change.number, 0, change.part) for change in recording.micro_batches if change.num_bytes)
    replay.look()
    return replay.at_peak


class _Replay:
    def __init__(self) -> None:
        self.at_peak: dict[str, int] = {}
        self._peak = 0
        self._allocator = CachingAllocator()
        self._living: dict[int, tuple[Change, list[Block]]] = {}
        self._parts: dict[str, int] = {}

    def run(self, changes: Iterable[Change], pieces: Mapping[int, int] = MappingProxyType({})) -> None:
        """Do what is recorded; ``pieces``: see ``Recording``."""
        for change in changes:
            blocks: list[Block] = []
            if change.number in self._living:
                self.look()  # it is never more than before something is let go of
                before, blocks = self._living.pop(change.number)
                self._parts[before.part] -= whole(before.num_bytes)
                if before.num_bytes != change.num_bytes:
                    for block in blocks:
                        self._allocator.free(block)
                    blocks = []
            if change.num_bytes:
                number = pieces.get(change.num_bytes, 1)
                blocks = blocks or [self._allocator.allocate(change.num_bytes // number) for _ in range(number)]
                self._living[change.number] = change, blocks
                self._parts[change.part] = self._parts.get(change.part, 0) + whole(change.num_bytes)

    def look(self) -> None:
        if self._allocator.allocated_bytes > self._peak:
            self._peak = self._allocator.allocated_bytes
            self.at_peak = {part: num_bytes for part, num_bytes in self._parts.items() if num_bytes}
            if rounding := self._peak - sum(self.at_peak.values()):
                self.at_peak["rounding"] = rounding
