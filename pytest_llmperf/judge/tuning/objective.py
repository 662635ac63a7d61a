"""Objectives: what the best configuration has least, or most, of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_llmperf.records.trial import Trial


@dataclass(frozen=True)
class Objective:
    """One of them."""

    name: str
    words: str
    """What the best one has, for people."""
    cost: Callable[[Trial], float | None]
    """What it has least of, a positive number; ``None`` where the trial does not tell."""
    is_of_time: bool = True
    """Whether it scatters as times do."""

    def log_of(self, trial: Trial) -> float | None:
        """The logarithm of a trial's cost; ``None`` where it failed or does not tell."""
        cost = self.cost(trial) if trial.is_measured else None
        return None if cost is None or cost <= 0 else math.log(cost)


def _seconds_per_token(trial: Trial) -> float | None:
    return trial.step_seconds / trial.tokens_per_step if trial.tokens_per_step else None


def _gpu_seconds_per_token(trial: Trial) -> float | None:
    rate = trial.tokens_per_second_per_gpu
    return 1 / rate if rate else None


OBJECTIVES: Mapping[str, Objective] = {
    one.name: one
    for one in (
        Objective("throughput", "the most tokens/s", _seconds_per_token),
        Objective("cost", "the fewest GPU-seconds for a token", _gpu_seconds_per_token),
        Objective("energy", "the fewest joules for a token", lambda trial: trial.joules_per_token),
        Objective("memory", "the lowest peak memory", lambda trial: float(trial.peak_reserved_bytes) or None, False),
    )
}


def front(trials: Mapping[str, Trial]) -> list[str]:
    """Of ``trials`` that rank, by a name, those that no other beats in both speed and memory; the fastest first."""
    measured = sorted(
        (name for name, trial in trials.items() if trial.ranks),
        key=lambda name: (-trials[name].tokens_per_second_per_gpu, trials[name].peak_reserved_bytes),
    )
    best, least = list[str](), math.inf
    for name in measured:
        if trials[name].peak_reserved_bytes < least:
            least = trials[name].peak_reserved_bytes
            best.append(name)
    return best
