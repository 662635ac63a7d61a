"""The blocks that CUDA's caching allocator gives out: what it counts as allocated is theirs, not what was asked for.

After PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``, for one stream and its settings as they come: the smallest free
block that is large enough is taken, split where what is left over is worth it, and merged with its free neighbours
when it is given back.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Block:
    """A piece of a segment, between its neighbours."""

    size: int
    address: int
    is_small: bool
    is_free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class CachingAllocator:
    """One GPU's memory, which never ends."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._num_segments = 0
        # By size, then address: as it looks for the best fit.
        self._free: dict[bool, list[Block]] = {True: [], False: []}

    def allocate(self, num_bytes: int) -> Block:
        """A block of at least ``num_bytes``."""
        size = max(GRANULE, whole(num_bytes))
        free = self._free[size <= _SMALL]
        at = bisect.bisect_left(free, (size, 0), key=_order)
        if at < len(free):
            block = free.pop(at)
            block.is_free = False
        else:
            block = self._segment(size)
        rest = block.size - size
        if rest >= GRANULE if block.is_small else rest > _SMALL:
            self._split(block, size)
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Give ``block`` back."""
        self.allocated_bytes -= block.size
        before, after = block.before, block.after
        if after is not None and after.is_free:
            self._forget(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        if before is not None and before.is_free:
            self._forget(before)
            block.size, block.address, block.before = block.size + before.size, before.address, before.before
            if block.before is not None:
                block.before.after = block
        self._keep(block)

    def _segment(self, size: int) -> Block:
        """A new segment in one block."""
        large = _LARGE_SEGMENT if size < _OWN_SEGMENT else whole(size, _STEP)
        segment = _SMALL_SEGMENT if size <= _SMALL else large
        self.reserved_bytes += segment
        self._num_segments += 1
        return Block(segment, self._num_segments * _APART, is_small=size <= _SMALL)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.address + size, block.is_small, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        self._keep(rest)

    def _keep(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], block, key=_order)

    def _forget(self, block: Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect.bisect_left(free, _order(block), key=_order))


def _order(block: Block) -> tuple[int, int]:
    return block.size, block.address


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

    def run(self, changes: Iterable[Change], pieces: Mapping[int, int] | None = None) -> None:
        """Do what is recorded; ``pieces``: see ``Recording``."""
        for change in changes:
            blocks = self._let_go_of(change) if change.number in self._living else []
            if not blocks and change.num_bytes:
                number = (pieces or {}).get(change.num_bytes, 1)
                blocks = [self._allocator.allocate(change.num_bytes // number) for _ in range(number)]
            if change.num_bytes:
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

    def _let_go_of(self, change: Change) -> list[Block]:
        """The blocks of what ``change`` is of, if it stays as large: else none any more."""
        self.look()  # it is never more than before something is let go of
        before, blocks = self._living.pop(change.number)
        self._parts[before.part] -= whole(before.num_bytes)
        if before.num_bytes == change.num_bytes:
            return blocks
        for block in blocks:
            self._allocator.free(block)
        return []
