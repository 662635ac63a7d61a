"""Which micro-batch sizes train: several of them in one process, a fresh model each, until the largest is known."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pytest_llmperf.observe.device import still_allocated
from pytest_llmperf.records.batch_size_search import Search
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.failure_file import write_json
from pytest_llmperf.worker.memory_limit import Headroom, lack_of_memory
from pytest_llmperf.worker.request import Trained

# More than this left behind by a size that is done, and the next one would not be told the truth.
_LEFT_BEHIND = 64 * 2**20


def try_sizes(
    spec: TrainSpec, search: Search, train: Callable[[TrainSpec], Trained], folder: Path, headroom: Headroom
) -> None:
    """Search, and leave ``sizes.json``: each size tried, in order, with its peak allocated bytes or none.

    It ends early where memory is not returned: fresh launches then go on from what is known.
    """
    tried: list[tuple[int, int | None]] = []
    while (size := search.next()) is not None:
        peak = _peak_of(replace(spec, micro_batch_size=size), train, headroom)
        search.note(size, peak)
        tried.append((size, peak))
        write_json(folder / "sizes.json", tried)
        if _still_held() > _LEFT_BEHIND:
            return


def _peak_of(spec: TrainSpec, train: Callable[[TrainSpec], Trained], headroom: Headroom) -> int | None:
    headroom.forget()
    try:
        return train(spec).peak_allocated_bytes
    except Exception as error:
        with headroom.lifted():
            lack = lack_of_memory(error, headroom)
        if lack is None:
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the tensors that were too many
        return None


def _still_held() -> int:
    gc.collect()
    return still_allocated()
