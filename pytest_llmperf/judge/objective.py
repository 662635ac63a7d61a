"""What a trial says, what the best has least of, and which of two has less of it where they take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.repeats import unlike_losses
from pytest_llmperf.judge.stats import Noise, Pairs
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support.codec import Amount, Count

# What became of a trial beside the kinds of a launch's failure: its record contradicts its spec.
_CONTRADICTED = "contradicted"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One launch for few steps; a figure is 0 where it failed, or where nobody told."""

    digest: str
    id: str
    wall_seconds: Amount
    """From its request to its end, without the wait for a fork server's imports."""
    step_seconds: Amount = 0.0
    """Median of its steady steps, and the relative standard error of that."""
    step_error: Amount = 0.0
    steps: Count = 0
    tokens_per_step: Count = 0
    """Of all ranks."""
    gpus: Count = 1
    peak_reserved_bytes: Count = 0
    """Of the fullest rank."""
    power_watts: Amount = 0.0
    """Of all its GPUs together while it trained."""
    failure: str = ""
    """Why it says nothing of its speed, in one line; empty where it does."""
    kind: str = ""
    """``oom``, ``timeout``, ... as ``records.failure`` has them, or ``_CONTRADICTED``."""
    disturbances: tuple[str, ...] = ()
    """What around it may have spoilt it, a line each: other processes on its hardware, heat. It ranks nowhere."""
    losses: tuple[float, ...] = ()
    """Of the steps of a script, and those of a second launch, of the first one that is tried."""
    losses_again: tuple[float, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """The files of a script's project, each with the digest of its content: with others it is made anew."""

    @property
    def is_measured(self) -> bool:
        return not self.failure

    @property
    def ranks(self) -> bool:
        """Whether its figures may stand beside those of others."""
        return self.is_measured and not self.disturbances

    @property
    def is_too_large(self) -> bool:
        """Whether the hardware has too little memory for it, with nobody else there."""
        return self.kind == "oom" and not self.disturbances

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.gpus / self.step_seconds if self.step_seconds else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Of all GPUs together."""
        return self.step_seconds / self.tokens_per_step if self.tokens_per_step else 0.0

    @property
    def joules_per_token(self) -> float | None:
        return self.power_watts * self.seconds_per_token or None

    def contradicted(self, why: str) -> Trial:
        return replace(self, failure=why, kind=_CONTRADICTED)

    def unlike(self, held: Trial, *, is_same_batch: bool) -> str:
        """How it learns otherwise than ``held``, another of its script; empty where it does not, or nobody knows."""
        more = self.tokens_per_step / held.tokens_per_step
        return unlike_losses(self.losses, held.losses, held.losses_again, more, is_same_batch=is_same_batch)

    @classmethod
    def of(cls, launch: Launch, troubles: tuple[str, ...] = (), disturbances: tuple[str, ...] = ()) -> Trial:
        """What ``launch`` showed; ``troubles`` say what in it contradicts its spec."""
        return cls(
            digest=launch.digest,
            id=launch.spec_id,
            wall_seconds=launch.wall_seconds,
            step_seconds=launch.tokens_per_step / launch.tokens_per_second,
            step_error=launch.median_error,
            steps=len(launch.step_seconds),
            tokens_per_step=launch.tokens_per_step,
            gpus=len(launch.ranks),
            peak_reserved_bytes=launch.peak_reserved_bytes,
            power_watts=launch.health.power_watts,
            failure="; ".join(troubles),
            kind=_CONTRADICTED if troubles else "",
            disturbances=disturbances,
            losses=launch.losses if launch.is_script else (),
            sources=launch.sources,
        )


@dataclass(frozen=True)
class Objective:
    name: str
    words: str
    """What the best one has, for people."""
    cost: Callable[[Trial], float | None]
    """What it has least of, a positive number; 0 or ``None`` where the trial does not tell."""
    is_of_time: bool = True
    """Whether it scatters as times do."""

    def log_of(self, trial: Trial) -> float | None:
        """The logarithm of a trial's cost; ``None`` where it failed or does not tell."""
        cost = self.cost(trial) if trial.is_measured else None
        return math.log(cost) if cost else None


OBJECTIVES: Mapping[str, Objective] = {
    one.name: one
    for one in (
        Objective("throughput", "the most tokens/s", lambda trial: trial.seconds_per_token),
        Objective("cost", "the fewest GPU-seconds for a token", lambda trial: trial.seconds_per_token * trial.gpus),
        Objective("energy", "the fewest joules for a token", lambda trial: trial.joules_per_token),
        Objective("memory", "the lowest peak memory", lambda trial: trial.peak_reserved_bytes, is_of_time=False),
    )
}

#: Configurations closer than this fraction are told apart by turns and not by trials.
CLOSE = 0.015
# Two-sided confidence in what is shown; closer than this, as a logarithm, or than one's own scatter, two are a tie.
_CONFIDENT, _TIE = 0.975, 0.005
# What peak memory is taken to differ by itself, beside what is seen of that.
_MEMORY_ERROR = 0.003


@dataclass(frozen=True)
class Turns:
    """How the second of two did beside the first."""

    log: float
    """Of its cost over the first one's: below 0 it is the better one."""
    wide: float
    """Half of the interval's width."""
    pairs: int
    alike: float = _TIE
    """Closer than this they are a tie."""

    @property
    def low(self) -> float:
        return self.log - self.wide

    @property
    def high(self) -> float:
        return self.log + self.wide

    @property
    def verdict(self) -> str:
        """``second`` or ``first`` is better, a ``tie``, or nothing yet."""
        if self.high < 0:
            return "second"
        if self.low > 0:
            return "first"
        return "tie" if max(abs(self.low), abs(self.high)) <= self.alike else ""


def turns_of(pairs: Pairs, objective: Objective, noise: Noise, *, ends_anywhere: bool = False) -> Turns | None:
    """What ``pairs`` show; ``None`` where one does not tell what the objective is about. ``ends_anywhere``: asked after
    each pair, with a look counted for each doubling: of 100 alike in 24 pairs, 7 are told apart, and 20 without."""
    logs = []
    for pair in pairs:
        costs = [objective.log_of(Trial.of(launch)) for launch in pair]
        if costs[0] is None or costs[1] is None:
            return None
        logs.append(costs[1] - costs[0])
    if not objective.is_of_time:
        return Turns(fmean(logs), _MEMORY_ERROR + (max(logs) - min(logs)) / 2, len(pairs))
    of_time = stats.paired_difference(pairs, noise)  # power scatters no more than time does
    looks = 1 + math.log2(len(pairs)) if ends_anywhere else 1
    wide = stats.quantile(1 - (1 - _CONFIDENT) / looks, of_time.df) * of_time.error
    return Turns(fmean(logs), wide, len(pairs), max(_TIE, noise.launch.sd))
