"""Stopping: ends a launch once more steps would say nothing that matters, every rank at the same step.

Rank 0 decides from the steps that its device has finished, and posts its answer in torchrun's own store; the others
read it there. This happens at a few steps that all ranks know beforehand, on the host, which is ahead of the device.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Protocol

from torch.distributed import PrefixStore, Store, TCPStore

from pytest_llmperf.records.launch import Place
from pytest_llmperf.records.launch_end import DECIDED, GOES_ON, PassingRanges, looks, why_end
from pytest_llmperf.spec.train_spec import TrainSpec


class Clock(Protocol):
    def so_far(self) -> tuple[float, ...]:
        """Times of the steps that are finished, in seconds, without waiting for others."""


class Stopping:
    """One rank's part in the decision."""

    def __init__(  # noqa: PLR0913 - the facts of one rank, and of what was asked for
        self,
        spec: TrainSpec,
        clock: Clock,
        rank: int,
        place: Place | None = None,
        passing: PassingRanges | None = None,
        *,
        all_steps: bool = False,
    ) -> None:
        """``place`` is this rank's; where all of them are chooses from ``passing``. ``all_steps``: it does not look."""
        self._spec, self._clock, self._rank, self._passing = spec, clock, rank, passing
        self._looks = frozenset(() if all_steps else looks(spec.min_steps, spec.steps))
        self._store = _store() if spec.gpus > 1 else None
        self._places = [] if place is None else [place]
        self._why = GOES_ON
        if self._store is not None and place is not None:
            self._store.set(f"place-{rank}", json.dumps(asdict(place)))

    @property
    def evidence(self) -> dict[str, str]:
        """What a reader of few steps should know; nothing of a launch that ended as all do."""
        return {"ended": DECIDED} if self._why == DECIDED else {}

    def now(self, step: int) -> bool:
        """Whether ``step``, which this rank has just issued, is the last one."""
        if step >= self._spec.steps:
            return True
        if step not in self._looks:
            return False
        self._why = self._look() if self._store is None else self._agreed(self._store, f"stop-{step}")
        return self._why != GOES_ON

    def _agreed(self, store: Store, key: str) -> str:
        if self._rank == 0:
            if self._passing is not None and len(self._places) < self._spec.gpus:
                # They were told before the first step, in which all ranks met.
                told = (store.get(f"place-{rank}") for rank in range(self._spec.gpus))
                self._places = [Place(**json.loads(place)) for place in told]
            store.set(key, self._look())
        return str(store.get(key).decode())

    def _look(self) -> str:
        passing = None if self._passing is None else self._passing.at(self._places)
        return why_end(self._clock.so_far(), self._spec.warmup_steps, passing)


def _store() -> Store:
    # The server is torchrun's agent, or rank 0's process group; either way it is there.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore("llmperf", store)
