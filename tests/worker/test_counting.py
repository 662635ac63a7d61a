"""What a counter of storages sees: births, deaths, changes of size; and what an allocator gives out for them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.worker.estimate.storages import (
    Block,
    CachingAllocator,
    Change,
    Recording,
    StorageCounter,
    parts_at_peak,
)
from tests.examples import examples

pytestmark = pytest.mark.torchrun

BLOCK = 512

# Something is made of so many bytes, or the one made longest ago dies, or it takes so many bytes from now on.
STEPS = st.lists(st.tuples(st.sampled_from(["made", "gone", "resized"]), st.integers(0, 5000)), max_size=30)


@given(STEPS)
@examples(50)
def test_the_peak_is_the_highest_sum_of_whole_blocks(steps: list[tuple[str, int]]) -> None:
    counter, living, sizes, peak = StorageCounter(vocabulary_size=0), [], [], 0
    with counter, counter.resizing():
        for what, num_bytes in steps:
            if what == "made":
                living.append(torch.empty(num_bytes, dtype=torch.uint8))
                sizes.append(num_bytes)
            elif living and what == "gone":
                del living[0], sizes[0]
            elif living:
                living[0].untyped_storage().resize_(num_bytes)
                sizes[0] = num_bytes
            peak = max(peak, sum(-(-size // BLOCK) * BLOCK for size in sizes))
    assert sum(at_peak(counter).values()) == peak


def at_peak(counter: StorageCounter) -> dict[str, int]:
    return parts_at_peak(Recording(counter.take(), (), (), ()))


def counted(make: Any) -> dict[str, int]:
    counter = StorageCounter(vocabulary_size=7)
    counter.part = "activations"
    with counter:
        make()
    return at_peak(counter)


def test_a_view_is_counted_once() -> None:
    assert counted(lambda: torch.empty(BLOCK // 4).view(2, -1).t()) == {"activations": BLOCK}


def test_what_is_as_wide_as_the_vocabulary_is_logits() -> None:
    assert counted(lambda: torch.empty(3, 7)) == {"logits": BLOCK}


def test_sizes_change_unseen_when_it_is_done() -> None:
    counter, real = StorageCounter(vocabulary_size=0), torch.UntypedStorage.resize_
    with pytest.raises(KeyError), counter.resizing():
        raise KeyError
    assert torch.UntypedStorage.resize_ is real


MIB = 2**20


def given_out(*sizes: int) -> list[int]:
    allocator = CachingAllocator()
    return [allocator.allocate(size).size for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ([1, 512, 513], [512, 512, 1024]),
        # Segments of 20 MiB for what is smaller than 10: what is left of one is a block while it is more than 1 MiB.
        ([9 * MIB, 10 * MIB - 1, 2 * MIB], [9 * MIB, 11 * MIB, 2 * MIB]),
        # From there on one segment each, of whole 2 MiB.
        ([15 * MIB, 16 * MIB, 16 * MIB + 512], [16 * MIB, 16 * MIB, 16 * MIB + 512]),
    ],
    ids=["in granules", "from a segment for several", "from one of its own"],
)
def test_a_block_keeps_what_is_not_worth_splitting_off(sizes: list[int], blocks: list[int]) -> None:
    assert given_out(*sizes) == blocks


def test_the_smallest_block_that_is_large_enough_is_taken_and_neighbours_are_merged() -> None:
    allocator = CachingAllocator()
    large, small, apart = (allocator.allocate(size * MIB) for size in (64, 32, 20))
    allocator.free(large)
    allocator.free(small)
    pieces = [allocator.allocate(16 * MIB) for _ in range(2)]
    assert {piece.address for piece in pieces} == {small.address, small.address + 16 * MIB}
    for piece in pieces:
        allocator.free(piece)
    assert allocator.allocate(32 * MIB).address == small.address
    allocator.free(apart)
    assert allocator.reserved_bytes == 116 * MIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB) | st.integers(1, 4096)), max_size=60))
def test_no_blocks_overlap_and_none_is_much_larger_than_asked(steps: list[tuple[bool, int]]) -> None:
    allocator, living = CachingAllocator(), list[tuple[Block, int]]()
    for is_asked, num_bytes in steps:
        if is_asked:
            living.append((allocator.allocate(num_bytes), num_bytes))
        elif living:
            allocator.free(living.pop(num_bytes % len(living))[0])
        assert allocator.allocated_bytes == sum(block.size for block, _ in living) <= allocator.reserved_bytes
        assert all(asked <= block.size <= asked + MIB + BLOCK for block, asked in living)
        ends = sorted((block.address, block.address + block.size) for block, _ in living)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    for block, _ in living:
        allocator.free(block)
    assert allocator.allocated_bytes == 0


def test_a_step_after_the_first_finds_the_states_that_the_first_has_made() -> None:
    step = Recording(
        model=[Change(0, 1024, "weights")],
        first_update=[Change(1, 512, "optimizer"), Change(2, 512, "optimizer"), Change(2, 0, "optimizer")],
        micro_batches=[Change(3, 2048, "activations"), Change(4, 512, "gradients"), Change(3, 0, "activations")],
        update=[Change(5, 512, "optimizer"), Change(5, 0, "optimizer")],
    )
    assert parts_at_peak(step) == {"weights": 1024, "activations": 2048, "gradients": 512, "optimizer": 512}


def test_what_an_optimizer_makes_at_once_is_given_out_in_its_pieces() -> None:
    update = [Change(0, 30 * MIB, "optimizer"), Change(0, 0, "optimizer")]
    whole, halved = (parts_at_peak(Recording((), update, (), (), pieces)) for pieces in ({}, {30 * MIB: 2}))
    assert whole == {"optimizer": 30 * MIB}
    assert halved == {"optimizer": 30 * MIB, "rounding": 2 * MIB}
