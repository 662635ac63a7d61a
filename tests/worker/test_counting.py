"""What a counter of storages sees: births, deaths, changes of size, and the highest sum of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_llmperf.worker.estimate.storage_counter import Counter

pytestmark = pytest.mark.torchrun

BLOCK = 512

# Something is made of so many bytes, or the one made longest ago dies, or it takes so many bytes from now on.
STEPS = st.lists(st.tuples(st.sampled_from(["made", "gone", "resized"]), st.integers(0, 5000)), max_size=30)


@given(STEPS)
@settings(deadline=None, max_examples=50)
def test_the_peak_is_the_highest_sum_of_whole_blocks(steps: list[tuple[str, int]]) -> None:
    counter, living, sizes, peak = Counter(vocabulary_size=0), [], [], 0
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
    assert sum(counter.at_peak.values()) == peak


def counted(make: Any) -> dict[str, int]:
    counter = Counter(vocabulary_size=7)
    counter.part = "activations"
    with counter:
        make()
    return counter.at_peak


def test_a_view_is_counted_once() -> None:
    assert counted(lambda: torch.empty(BLOCK // 4).view(2, -1).t()) == {"activations": BLOCK}


def test_what_is_as_wide_as_the_vocabulary_is_logits() -> None:
    assert counted(lambda: torch.empty(3, 7)) == {"logits": BLOCK}


def test_sizes_change_unseen_when_it_is_done() -> None:
    counter, real = Counter(vocabulary_size=0), torch.UntypedStorage.resize_
    with pytest.raises(KeyError), counter.resizing():
        raise KeyError
    assert torch.UntypedStorage.resize_ is real
