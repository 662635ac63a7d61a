"""Tuning: what a search has found, whoever is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_llmperf.engine.conclusion import Conclusion
from pytest_llmperf.judge.tuning.turns import Turns
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.spec.train_spec import TrainSpec

#: Of a choice without which the winner's memory would not be enough.
NEEDED = "needed to fit"


@dataclass(frozen=True)
class Tried:
    """A configuration and its trial."""

    spec: TrainSpec
    trial: Trial
    was_kept: bool = False
    """Whether an earlier search made it."""


@dataclass(frozen=True)
class Compared:
    """Two configurations that took turns on the same hardware."""

    first: TrainSpec
    second: TrainSpec
    turns: Turns


@dataclass(frozen=True)
class Share:
    """What one choice of the winner's brought: its cost with it over that with the choice that it began with."""

    axis: str
    before: str
    after: str
    log: float
    wide: float
    """Half of its interval's width."""
    how: str
    """``turns``, two ``trials``, the ``estimate`` of all trials, or ``NEEDED``."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What is known where it ends."""

    begun_at: TrainSpec
    tried: tuple[Tried, ...] = ()
    """In their order."""
    winner: TrainSpec | None = None
    ties: tuple[TrainSpec, ...] = ()
    """Others that turns could not tell from the winner."""
    compared: tuple[Compared, ...] = ()
    shares: tuple[Share, ...] = ()
    parity: Conclusion | None = None
    """Whether the winner trains as its plain form does; ``None`` where that was not asked, or no time was left."""
    case: Conclusion | None = None
    """The winner launched, and judged, as a case; ``None`` as above."""
    front: tuple[TrainSpec, ...] = ()
    """Those that no other beats in both speed and memory."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """How many combinations cannot be, by the reason."""
    too_large: int = 0
    """How many of those looked at do not fit, by predicted memory or by what ran out of it."""
    left: int = 0
    """How many were neither tried nor found not to fit."""
    put_off: Mapping[str, int] = field(default_factory=dict)
    """How many of them come after all others, by what they have in common with a trial that ran out of its time."""
    unseen: int = 0
    """How many of a large space were not even looked at."""
    better_chance: float = 1.0
    """That one of those left is better by more than 1 %, as far as trials tell."""
    memory_errors: tuple[float, float] | None = None
    """The least and the largest of what trials had reserved over what was predicted that tensors take, minus 1."""
    limit_bytes: int = 0
    """What each rank may hold; 0: nobody looked."""
    ended: str = ""
    """Why before its end; empty where it was not."""
    least: tuple[TrainSpec, int] | None = None
    """Where nothing was measured: what takes the least memory, and how many bytes are predicted of it; 0: of
    nothing memory can be predicted, and it was tried."""
    unkept: str = ""
    """Why a next search would make its trials anew; empty where they are kept."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def trial_of(self, spec: TrainSpec) -> Trial | None:
        """The last trial of ``spec``: what spoilt the one before it may have been over."""
        return next((one.trial for one in reversed(self.tried) if one.spec == spec), None)
