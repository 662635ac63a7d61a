"""From what the ranks saw to the launch record."""

from __future__ import annotations

import platform

import torch

from pytest_llmperf.measurement import Launch, RankRecord
from pytest_llmperf.spec import TrainSpec
from pytest_llmperf.worker.environment import device_name, environment
from pytest_llmperf.worker.train import Trained


def rank_record(rank: int, device: torch.device, trained: Trained) -> RankRecord:
    """This rank's share of the record."""
    name = device_name(device)
    if device.type == "cuda":
        name = f"{name} {torch.cuda.get_device_properties(device).uuid}"
    return RankRecord(
        rank=rank,
        host=platform.node(),
        device=name,
        tokens_per_step=trained.tokens_per_step,
        step_seconds=trained.step_seconds,
        peak_reserved_bytes=trained.peak_reserved_bytes,
        peak_allocated_bytes=trained.peak_allocated_bytes,
    )


def launch_record(
    spec: TrainSpec, started_at: str, device: torch.device, trained: Trained, ranks: list[RankRecord]
) -> Launch:
    """The whole launch, on rank 0; the launcher, which sees it from outside, adds its wall time and health."""
    return Launch(
        spec_id=spec.id,
        digest=spec.digest,
        started_at=started_at,
        wall_seconds=0.0,
        train_seconds=trained.train_seconds,
        warmup_steps=spec.warmup_steps,
        parameters=trained.parameters,
        losses=trained.losses,
        ranks=tuple(sorted(ranks, key=lambda record: record.rank)),
        evidence=trained.evidence,
        environment=environment(device),
        canary=trained.canary,
    )
