"""Trials, and what the best configuration has least, or most, of: by its trial, and by launches in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.stats import Noise, Spread, Squares, sum_of_squares
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support.codec import Amount, Count

#: What became of a trial beside the kinds of a launch's failure: its record contradicts its spec.
CONTRADICTED = "contradicted"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One launch for few steps."""

    digest: str
    id: str
    wall_seconds: Amount
    """From its request to its end."""
    step_seconds: Amount = 0.0
    """Median of its steady steps; 0 where it failed."""
    step_error: Amount = 0.0
    """Relative standard error of that median."""
    steps: Count = 0
    first_step_seconds: Amount = 0.0
    tokens_per_step: Count = 0
    """Of all ranks."""
    gpus: Count = 1
    peak_reserved_bytes: Count = 0
    """Of the fullest rank."""
    power_watts: Amount = 0.0
    """Of all its GPUs together while it trained; 0 where nobody told."""
    failure: str = ""
    """Why it says nothing of its speed, in one line; empty where it does."""
    kind: str = ""
    """``oom``, ``timeout``, ... as ``records.failure`` has them, or ``CONTRADICTED``."""
    disturbances: tuple[str, ...] = ()
    """What around it may have spoilt it, a line each: other processes on its hardware, heat. It ranks nowhere."""
    started_at: str = ""
    site: str = ""
    """On which hardware."""

    @property
    def is_measured(self) -> bool:
        """Whether it says how fast its configuration is."""
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
        """Steady; 0 where it failed."""
        return self.tokens_per_step / self.gpus / self.step_seconds if self.step_seconds else 0.0

    @property
    def joules_per_token(self) -> float | None:
        """The energy of all its GPUs; ``None`` where nobody told."""
        if not self.power_watts or not self.tokens_per_step:
            return None
        return self.power_watts * self.step_seconds / self.tokens_per_step

    @classmethod
    def of(
        cls, launch: Launch, spec_id: str, troubles: tuple[str, ...] = (), disturbances: tuple[str, ...] = ()
    ) -> Trial:
        """What ``launch`` showed; ``troubles`` say what in it contradicts its spec."""
        return cls(
            digest=launch.digest,
            id=spec_id,
            wall_seconds=launch.wall_seconds,
            step_seconds=launch.tokens_per_step / launch.tokens_per_second,
            step_error=launch.median_error,
            steps=len(launch.step_seconds),
            first_step_seconds=launch.step_seconds[0],
            tokens_per_step=launch.tokens_per_step,
            gpus=len(launch.ranks),
            peak_reserved_bytes=launch.peak_reserved_bytes,
            power_watts=launch.health.power_watts,
            failure="; ".join(troubles),
            kind=CONTRADICTED if troubles else "",
            disturbances=disturbances,
            started_at=launch.started_at,
            site=" + ".join(sorted({rank.device for rank in launch.ranks})),
        )


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


OBJECTIVES: Mapping[str, Objective] = {
    one.name: one
    for one in (
        Objective(
            "throughput",
            "the most tokens/s",
            lambda trial: trial.step_seconds / trial.tokens_per_step if trial.tokens_per_step else None,
        ),
        Objective(
            "cost",
            "the fewest GPU-seconds for a token",
            lambda trial: 1 / trial.tokens_per_second_per_gpu if trial.tokens_per_second_per_gpu else None,
        ),
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


# Turns: which of two configurations is the better one, from launches that took turns on the same hardware.

# Two-sided confidence in what is shown; and closer than this, as a logarithm, two are a tie.
_CONFIDENT, _TIE = 0.975, 0.005
# Before any of it is seen, peak memory is taken to scatter so many times less than time does.
_STEADIER = 4.0


@dataclass(frozen=True)
class Turns:
    """How the second of two did beside the first."""

    log: float
    """Of its cost over the first one's: below 0 it is the better one."""
    wide: float
    """Half of the interval's width."""
    pairs: int

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
        return "tie" if max(abs(self.low), abs(self.high)) <= _TIE else ""


def turns_of(pairs: Sequence[tuple[Launch, Launch]], objective: Objective, noise: Noise) -> Turns | None:
    """What ``pairs`` show; ``None`` where one of them does not tell what the objective is about."""
    logs = []
    for pair in pairs:
        costs = [objective.log_of(Trial.of(launch, launch.spec_id)) for launch in pair]
        if costs[0] is None or costs[1] is None:
            return None
        logs.append(costs[1] - costs[0])
    if objective.is_of_time:  # power scatters no more than time does
        of_time = stats.paired_difference(pairs, noise)
        error, df = of_time.error, of_time.df
    else:
        prior = Spread(noise.launch.sd * math.sqrt(2) / _STEADIER, noise.launch.df)
        own = prior.moderated(Squares(sum_of_squares(logs), len(logs) - 1))
        error, df = own.sd / math.sqrt(len(logs)), own.df
    return Turns(fmean(logs), stats.quantile(_CONFIDENT, df) * error, len(pairs))
