"""From what the ranks saw to the launch record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_llmperf.records.launch import Launch, RankRecord
from pytest_llmperf.records.trace import Trace, merged
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.worker import canary, evidence
from pytest_llmperf.worker.environment import environment, place_of
from pytest_llmperf.worker.trained import Trained


@dataclass(frozen=True)
class Share:
    """What one rank contributes to the record."""

    record: RankRecord
    evidence: Mapping[str, Any]
    canary: Mapping[str, float]
    trace: Trace


def rank_share(rank: int, device: torch.device, trained: Trained) -> Share:
    """This rank's share of the record."""
    return Share(_rank_record(rank, device, trained), trained.evidence, trained.canary, trained.trace)


def _rank_record(rank: int, device: torch.device, trained: Trained) -> RankRecord:
    place = place_of(device)
    return RankRecord(
        rank=rank,
        host=place.host,
        device=place.device,
        tokens_per_step=trained.tokens_per_step,
        step_seconds=trained.step_seconds,
        waiting_seconds=trained.waiting_seconds,
        peak_reserved_bytes=trained.peak_reserved_bytes,
        peak_allocated_bytes=trained.peak_allocated_bytes,
        boot=place.boot,
    )


def launch_record(
    spec: TrainSpec, started_at: str, device: torch.device, trained: Trained, shares: Sequence[Share]
) -> Launch:
    """The whole launch, on rank 0, from the shares of all ranks in their order.

    The launcher, which sees it from outside, adds its wall time and health.
    """
    return Launch(
        spec_id=spec.id,
        digest=spec.digest,
        started_at=started_at,
        wall_seconds=0.0,
        train_seconds=trained.train_seconds,
        warmup_steps=spec.warmup_steps,
        parameters=trained.parameters,
        losses=trained.losses,
        # Of one rank it is the launch's.
        ranks=tuple(
            replace(share.record, canary=share.canary) if len(shares) > 1 else share.record for share in shares
        ),
        evidence=evidence.merged([share.evidence for share in shares]),
        environment=environment(device),
        canary=canary.slowest([share.canary for share in shares]),
        trace=merged([share.trace for share in shares]),
    )
