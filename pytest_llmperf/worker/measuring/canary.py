"""Canary: what the hardware gives to work that never changes, measured in each launch before its training begins.

It takes a tenth of a second. A chip that is slow at a plain matrix product explains a slow training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from pytest_llmperf.observe import device as gpu

_BATCHES, _WARM_BATCHES = 3, 1


def sing(device: torch.device) -> dict[str, float]:
    """Rates of this rank: matrix product in FLOP/s, copy in bytes/s, and all-reduce in bytes/s where there are peers.

    A copied byte counts twice, read and written; all-reduce by its bus bandwidth, 2·(n-1)/n of its bytes.
    """
    rates = _rates(device)
    gpu.give_back(device)
    return {name: round(rate, -6) for name, rate in rates.items()}


def slowest(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each rate of the rank where it was lowest: the job moves at its pace."""
    return {name: min(rates[name] for rates in by_rank) for name in by_rank[0]}


def _rates(device: torch.device) -> dict[str, float]:
    on_gpu = gpu.is_gpu(device)
    size, elements, repeats = (8192, 2**28, 10) if on_gpu else (512, 2**21, 5)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = torch.ones(size, size, dtype=dtype, device=device), torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    rates = {"matmul_flops": 2 * size**3 / _seconds(lambda: torch.matmul(a, b, out=out), device, repeats)}
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    rates["copy_bytes_per_second"] = 2 * num_bytes / _seconds(lambda: target.copy_(source), device, repeats)
    if dist.is_initialized() and dist.get_world_size() > 1:
        seconds = _seconds(lambda: dist.all_reduce(target[: elements // 4]), device, repeats)
        share = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        rates["all_reduce_bytes_per_second"] = share * num_bytes / 4 / seconds
    return rates


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one repetition: the median of a few batches, after one that warms up."""
    batches = []
    for _ in range(_WARM_BATCHES + _BATCHES):
        gpu.wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        gpu.wait(device)
        batches.append((time.perf_counter() - start) / repeats)
    return median(batches[_WARM_BATCHES:])
