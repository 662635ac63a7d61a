"""The blocks that CUDA's caching allocator gives out: what it counts as allocated is theirs, not what was asked for.

After PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``, for one stream and its settings as they come: the smallest free
block that is large enough is taken, split where what is left over is worth it, and merged with its free neighbours
when it is given back.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

_MIB = 2**20
#: The least that a block grows by.
GRANULE = 512
# What is at most as large lives in segments of its own kind, which are split down to the granule. Elsewhere what is
# left over is split off only if it is larger than this: else it stays a part of the block, and counts.
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
# Segments for what is larger, up to a limit beyond which each gets one of its own, in whole steps.
_LARGE_SEGMENT, _OWN_SEGMENT, _STEP = 20 * _MIB, 10 * _MIB, 2 * _MIB
# So far apart lie segments that no two of them touch.
_APART = 2**48


def whole(num_bytes: int, granule: int = GRANULE) -> int:
    """``num_bytes`` rounded up."""
    return -(-num_bytes // granule) * granule


class Block(NamedTuple):
    """A piece of a segment."""

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
        """A block of at least ``num_bytes``."""
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
        """Give ``block`` back."""
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


# Steps of a training, from what one of them made and let go of: each by the allocator that the last one left.


class Change(NamedTuple):
    """From now on, storage ``number`` has so many bytes, and is of this part. None: it is gone."""

    number: int
    num_bytes: int
    part: str


@dataclass(frozen=True)
class Recording:
    """What a training does to its storages."""

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
    """Bytes by part where most is allocated; ``workspaces`` are the matrix library's.

    ``rounding`` is what the allocator's blocks have beyond the storages in them.
    """
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
        """Remember the parts, if never was more allocated."""
        if self._allocator.allocated_bytes > self._peak:
            self._peak = self._allocator.allocated_bytes
            self.at_peak = {part: num_bytes for part, num_bytes in self._parts.items() if num_bytes}
            rounding = self._peak - sum(self.at_peak.values())
            if rounding:
                self.at_peak["rounding"] = rounding
