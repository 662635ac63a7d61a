"""In the place of ``pytest_llmperf.worker.train``: ranks that meet in every step over gloo, and sleep in between."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from pytest_llmperf.spec.fault_injection import Injection
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.worker.faults import Burner
from pytest_llmperf.worker.heartbeat import Heartbeat
from pytest_llmperf.worker.instruments import HostClock
from pytest_llmperf.worker.request import Request
from pytest_llmperf.worker.trained import Trained
from tests.fakes import evidence_of

_STEP_SECONDS = 0.05


def train(spec: TrainSpec, request: Request, device: torch.device, beat: Heartbeat) -> Trained:
    """As the real one is called, and with as many steps."""
    rank, tokens = int(os.environ["RANK"]), spec.sequences_per_step * spec.sequence_length // spec.gpus
    beat.enter("building")
    beat.step, beat.steps, beat.tokens_per_step = 0, spec.steps, tokens * spec.gpus
    if spec.gpus > 1:
        dist.init_process_group("gloo")
    clock, met, injection = HostClock(), torch.ones(1), Injection.from_environment(spec.gpus)
    burner = Burner(injection, device, clock) if injection.concerns(rank) else None
    beat.enter("training")
    clock.mark()
    for step in range(1, spec.steps + 1):
        time.sleep(_STEP_SECONDS)
        if spec.gpus > 1:
            dist.all_reduce(met)
        if burner is not None:
            burner.step(step)
        clock.mark()
        beat.step = step
    beat.enter("finishing")
    return Trained(
        step_seconds=clock.seconds(),
        waiting_seconds=(),
        losses=(6.0,) * spec.steps,
        tokens_per_step=tokens,
        peak_reserved_bytes=2**24,
        peak_allocated_bytes=2**23,
        train_seconds=sum(clock.seconds()),
        parameters=125_248,
        canary={"matmul_flops": 1e9, "copy_bytes_per_second": 1e9},
        evidence=evidence_of(spec),
    )
