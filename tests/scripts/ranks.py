"""Trainings of two ranks with gloo, one by each name: ``torchrun ranks.py NAME``, or ``python ranks.py spawn``."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from clock import Clock
from loops import STEPS, Block, Tiny, adam
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def no_sync(clock: Clock) -> None:
    """Accumulates, and exchanges gradients with the last micro-batch alone; ranks have unlike batches."""
    model: Any = DistributedDataParallel(Tiny())
    optimizer = adam(model)
    rows = 4 + 4 * dist.get_rank()
    for _ in range(STEPS):
        losses = []
        for index in range(2):
            with nullcontext() if index else model.no_sync():
                losses.append(model(torch.randint(101, (rows, 16))) / 2)
                losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(sum(losses), 2 * rows * 16)


def sharded(clock: Clock, model: Any = None) -> None:
    model = model or Tiny()
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)
    optimizer = adam(model)
    for _ in range(STEPS):
        ids = torch.randint(101, (4, 16))
        loss = model(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss.detach(), ids.numel())


def late(clock: Clock) -> None:
    """Rank 1 sleeps in its backward pass for as long as the environment says."""
    model = Tiny()
    if dist.get_rank() == 1:
        model.blocks[0].register_full_backward_hook(lambda *_: time.sleep(float(os.environ.get("SLEEP", "0"))))
    sharded(clock, model)


def spawned(rank: int) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": os.environ["PORT"]}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    Path(f"seed-{rank}").write_text(str(torch.initial_seed()))
    no_sync(Clock(f"{os.environ['OWN_CLOCK']}-of-{rank}"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(spawned, nprocs=2)
    else:
        dist.init_process_group("gloo")
        globals()[sys.argv[1]](Clock())
