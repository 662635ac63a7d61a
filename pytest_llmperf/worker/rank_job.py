"""One rank of a launch: a training that is measured and its record, or small trainings."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pytest_llmperf.observe.device import is_gpu, own_device
from pytest_llmperf.observe.environment import environment
from pytest_llmperf.observe.reference_work import slowest
from pytest_llmperf.observe.tracer import TRACED_STEPS
from pytest_llmperf.observe.vital_signs import Headroom, Heartbeat, watched
from pytest_llmperf.records import launch as records
from pytest_llmperf.records.learning import merged_learning
from pytest_llmperf.records.ranks import Later, Request, Trained, launch_of, merged_evidence, write_failure, write_json
from pytest_llmperf.settings.train_spec import Injection, TrainSpec
from pytest_llmperf.worker.imports import loaded


def recipe_of(request: Request) -> ModuleType:
    return import_module(f"{__package__}.recipes.{request.recipe}")


def run(  # noqa: PLR0913, PLR0917 - a rank, and who watches it
    request: Request, recipe: ModuleType, rank: int, started_at: str, beat: Heartbeat, headroom: Headroom
) -> None:
    beat.enter("building")
    spec, folder, device = request.spec, request.folder, own_device()
    # With a context, and before anything is timed, takes memory or looks at what is left.
    request.await_turn(beat.enter)
    with ExitStack() as stack:
        if not is_gpu(device):
            room = folder / f"room-{rank}.json"
            stack.enter_context(watched(headroom, room, to_be_capped=bool(request.memory_limit_bytes)))
        if request.memory_limit_bytes:
            headroom.cap(device, request.memory_limit_bytes)
        to_train = Injection.from_environment(spec.gpus).mutated(spec, rank)
        if request.parity:
            # Imported here: no launch that measures needs it, and a record tells of all that was imported.
            small = import_module(f"{recipe.__name__}.parity")
            small.make_small_trainings(to_train, request.parity, request, device, beat)
        else:
            recorder = Recorder(folder, rank, spec, started_at, device)
            trained = recipe.train(to_train, request, device, beat, recorder.measured)
            beat.write()  # once the record is there, its launcher may go on
            recorder.finished(trained)
        if dist.is_initialized():
            dist.destroy_process_group()


_Own = TypeVar("_Own")

# Beside ten times what its steps should take: the profiler's own start, and what it has seen, read in Python.
_TRACE_SECONDS, _TRACE_STEPS = 120.0, 10 * TRACED_STEPS


def from_ranks(own: _Own) -> list[_Own]:
    """The ``own`` of all ranks in their order; on other ranks than the first one nothing."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, found if dist.get_rank() == 0 else None)
    return found if dist.get_rank() == 0 else []


class Recorder:
    """Gathers what all ranks saw; rank 0 leaves it in the launch's folder."""

    def __init__(self, folder: Path, rank: int, spec: TrainSpec, started_at: str, device: torch.device) -> None:
        self._folder, self._rank, self._spec = folder, rank, spec
        self._started_at = started_at
        self._limit: threading.Timer | None = None
        self._shares: list[tuple[records.RankRecord, Mapping[str, Any]]] = []  # of all ranks
        self._environment: records.Environment | None = None
        if rank == 0:  # what is not as it was is told of a launch that fails, too
            self._environment = environment(device)
            write_json(folder / records.ENVIRONMENT_FILE, self._environment)

    def measured(self, trained: Trained) -> None:
        """All that is timed is over: what follows has to end in time, or all are ended."""
        self._gather(trained)
        self._leave([Later()] * len(self._shares), records.MEASURED_FILE)
        seconds = _TRACE_SECONDS + _TRACE_STEPS * median(trained.record.step_seconds)
        self._limit = threading.Timer(seconds, self._end, [seconds])
        self._limit.daemon = True
        self._limit.start()

    def finished(self, trained: Trained) -> None:
        """All is over; what was gathered before is not gathered again."""
        if self._limit is None:
            self._gather(trained)
        self._leave(from_ranks(trained.later), records.RECORD_FILE)
        if self._limit:
            self._limit.cancel()
        if self._rank == 0:
            (self._folder / records.MEASURED_FILE).unlink(missing_ok=True)

    def _gather(self, trained: Trained) -> None:
        """All but what ranks see later; the launcher adds its wall time and health."""
        self._shares, self._trained = from_ranks((trained.record, trained.evidence)), trained
        self._loaded = loaded()

    def _leave(self, later: Sequence[Later], name: str) -> None:
        """On rank 0, what was gathered with what was seen ``later`` by each rank."""
        if self._environment is None:
            return
        ranks, spec = tuple(record for record, _ in self._shares), self._spec
        kernels = [{**own, **one.kernels} for (_, own), one in zip(self._shares, later, strict=True)]
        launch = launch_of(
            spec,
            self._started_at,
            self._trained,
            [one.trace for one in later],
            gradient_norms=self._trained.gradient_norms,
            # Of one rank its canary is the launch's.
            ranks=ranks if len(ranks) > 1 else (replace(ranks[0], canary={}),),
            evidence=merged_evidence(kernels),
            environment=replace(self._environment, loaded=self._loaded),
            canary=slowest([record.canary for record in ranks]),
            planned_steps=spec.steps if len(self._trained.record.step_seconds) < spec.steps else 0,
            learning=merged_learning([one.learning for one in later]),
        )
        write_json(self._folder / name, launch)

    def _end(self, seconds: float) -> None:
        error = TimeoutError(f"they did not end within {seconds:.0f} s")
        write_failure(self._folder, self._rank, error, "error")
        os._exit(1)  # the rank itself waits for others, or for its device
