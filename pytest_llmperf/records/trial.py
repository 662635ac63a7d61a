"""Trial: what a few steps of one configuration showed, or why they showed nothing; and its JSON."""

from __future__ import annotations

from dataclasses import dataclass

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
