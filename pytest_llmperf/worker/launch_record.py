"""From what the ranks saw to the launch record."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pytest_llmperf.records.launch import MEASURED_FILE, RECORD_FILE, Launch, RankRecord
from pytest_llmperf.records.trace import Trace, merged
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.worker import evidence
from pytest_llmperf.worker.environment import environment, place_of
from pytest_llmperf.worker.failure_file import write_failure, write_json
from pytest_llmperf.worker.measuring import canary
from pytest_llmperf.worker.tracing.tracer import STEPS as TRACED_STEPS
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


# Beside ten times what its steps should take: the profiler's own start, and what it has seen, read in Python.
_TRACE_SECONDS, _TRACE_STEPS = 120.0, 10 * TRACED_STEPS


class Recorder:
    """Gathers what all ranks saw; rank 0 leaves it in the launch's folder."""

    def __init__(self, folder: Path, rank: int, spec: TrainSpec, started_at: str, device: torch.device) -> None:
        self._folder, self._rank, self._spec = folder, rank, spec
        self._started_at, self._device = started_at, device
        self._limit: threading.Timer | None = None

    def measured(self, trained: Trained) -> None:
        """All but the traced steps is over: these have to end in time, on each rank, or all are ended.

        A rank that fails in them, or waits for one that did, has nobody to tell; the launcher finds what was measured.
        """
        self._leave(trained, MEASURED_FILE)
        seconds = _TRACE_SECONDS + _TRACE_STEPS * median(trained.step_seconds)
        self._limit = threading.Timer(seconds, self._end, [seconds])
        self._limit.daemon = True
        self._limit.start()

    def finished(self, trained: Trained) -> None:
        """All is over."""
        self._leave(trained, RECORD_FILE)
        if self._limit:
            self._limit.cancel()
        if self._rank == 0:
            (self._folder / MEASURED_FILE).unlink(missing_ok=True)

    def _leave(self, trained: Trained, name: str) -> None:
        share = rank_share(self._rank, self._device, trained)
        shares: list[Any] = [share]
        if dist.is_initialized():
            shares = [None] * self._spec.gpus
            dist.gather_object(share, shares if self._rank == 0 else None)
        if self._rank == 0:
            record = launch_record(self._spec, self._started_at, self._device, trained, shares)
            write_json(self._folder / name, record.to_dict())

    def _end(self, seconds: float) -> None:
        error = TimeoutError(f"they did not end within {seconds:.0f} s")
        write_failure(self._folder, self._rank, error, "error")
        os._exit(1)  # the rank itself waits for others, or for its device


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
