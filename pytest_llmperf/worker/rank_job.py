"""What one rank of a launch does: the training that is measured, a search for the batch size, or small trainings."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from pytest_llmperf.observe.device import is_gpu, own_device, still_allocated
from pytest_llmperf.observe.vital_signs import Headroom, Heartbeat, lack_of_memory, watched
from pytest_llmperf.records.batch_size_search import Search
from pytest_llmperf.records.launch import Trained
from pytest_llmperf.settings.train_spec import Injection, TrainSpec
from pytest_llmperf.worker.folder import Request, write_json
from pytest_llmperf.worker.launch_record import Recorder
from pytest_llmperf.worker.settings.data import explained


class Recipe(Protocol):
    """A module of ``worker/recipes``."""

    __name__: str

    @staticmethod
    def train(
        spec: TrainSpec,
        request: Request,
        device: torch.device,
        beat: Heartbeat,
        measured: Callable[[Trained], None] = lambda _: None,
    ) -> Trained:
        """Train ``spec``, the request's or nearly, on this rank and return what was seen.

        What was ``measured`` is told before untimed steps: what breaks or hangs in these takes nothing from it.
        """


def recipe_of(request: Request) -> Recipe:
    return import_module(f"{__package__}.recipes.{request.recipe}")  # type: ignore[return-value]


def run(  # noqa: PLR0913, PLR0917 - a rank, and who watches it
    request: Request, recipe: Recipe, rank: int, started_at: str, beat: Heartbeat, headroom: Headroom
) -> None:
    beat.enter("building")
    spec, folder, device = request.spec, request.folder, own_device()
    train = partial(recipe.train, request=request, device=device, beat=beat)
    with ExitStack() as stack:
        if not is_gpu(device):
            room = folder / f"room-{rank}.json"
            stack.enter_context(watched(headroom, room, to_be_capped=bool(request.memory_limit_bytes)))
        if request.memory_limit_bytes:
            headroom.cap(device, request.memory_limit_bytes)
        to_train = Injection.from_environment(spec.gpus).mutated(spec, rank)
        if request.search:
            _try_sizes(to_train, request.search, train, folder, headroom)
            return
        if request.parity:
            # Imported here: no launch that measures needs it, and a record tells of all that was imported.
            small = import_module(f"{recipe.__name__}.parity")
            small.make_small_trainings(to_train, request.parity, request, device, beat)
        else:
            recorder = Recorder(folder, rank, spec, started_at, device)
            with explained():  # of one that died a while ago, too
                recorder.finished(train(to_train, measured=recorder.measured))
        if dist.is_initialized():
            dist.destroy_process_group()


def _try_sizes(
    spec: TrainSpec, search: Search, train: Callable[[TrainSpec], Trained], folder: Path, headroom: Headroom
) -> None:
    """Search, and leave ``sizes.json``: each size tried, in order, with its peak allocated bytes or none.

    It ends early where memory is not returned: fresh launches then go on from what is known.
    """
    tried: list[tuple[int, int | None]] = []
    while (size := search.next()) is not None:
        headroom.forget()
        peak = None
        try:
            peak = train(replace(spec, micro_batch_size=size)).record.peak_allocated_bytes
        except Exception as error:
            with headroom.lifted():
                lack = lack_of_memory(error, headroom)
            if lack is None:
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the tensors that were too many
        search.note(size, peak)
        tried.append((size, peak))
        write_json(folder / "sizes.json", tried)
        gc.collect()
        if still_allocated() > 64 * 2**20:  # left behind: the next size would not be told the truth
            return
