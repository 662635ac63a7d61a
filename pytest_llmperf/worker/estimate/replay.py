"""Steps of a training, from what one of them made and let go of: each by the allocator that the last one left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_llmperf.worker.estimate.caching_allocator import Block, CachingAllocator, whole


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
