"""Stopping: ends a launch once its median step time is known, every rank at the same step.

Rank 0 decides from the steps that its device has finished, and posts its answer in torchrun's own store; the others
read it there. This happens at a few steps that all ranks know beforehand, on the host, which is ahead of the device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from torch.distributed import PrefixStore, Store, TCPStore

from pytest_llmperf.records.steady_state import find_steady
from pytest_llmperf.spec.train_spec import TrainSpec

# Launches of one spec scatter by 0.3 % and more (docs/verdicts.md): a median known to this adds little to that.
ENOUGH = 0.002

# A launch that still drifts by more is not yet at its steady state.
_STEADY_DRIFT = 0.01

# The first looks are this many steps apart, later ones an eighth of what has run.
_STRIDE, _SHARE = 4, 8


class Clock(Protocol):
    def so_far(self) -> tuple[float, ...]:
        """Times of the steps that are finished, in seconds, without waiting for others."""


class Stopping:
    """One rank's part in the decision."""

    def __init__(self, spec: TrainSpec, clock: Clock, rank: int) -> None:
        self._spec, self._clock, self._rank = spec, clock, rank
        self._looks = frozenset(looks(spec.min_steps, spec.steps))
        self._store = _store() if spec.gpus > 1 else None

    def now(self, step: int) -> bool:
        """Whether ``step``, which this rank has just issued, is the last one."""
        if step not in self._looks:
            return False
        if self._store is None:
            return is_known(self._clock.so_far(), self._spec.warmup_steps)
        key = f"stop-{step}"
        if self._rank == 0:
            self._store.set(key, "yes" if is_known(self._clock.so_far(), self._spec.warmup_steps) else "no")
        return bool(self._store.get(key) == b"yes")


def looks(least: int, most: int) -> list[int]:
    """The steps after which a launch may end, growing further apart."""
    found = []
    step = least
    while step < most:
        found.append(step)
        step += max(_STRIDE, step // _SHARE)
    return found


def is_known(step_seconds: Sequence[float], warmup_steps: int) -> bool:
    """Whether more steps would say little more."""
    if len(step_seconds) <= warmup_steps:
        return False
    steady = find_steady(step_seconds, warmup_steps)
    return steady.error <= ENOUGH and abs(steady.drift) <= _STEADY_DRIFT


def _store() -> Store:
    # The server is torchrun's agent, or rank 0's process group; either way it is there.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore("llmperf", store)
