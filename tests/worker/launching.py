"""Launches that tests make by themselves: warm ones from a fork server that all tests of a session share, or cold."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch.local import LaunchRequest, LocalLauncher, WarmStart, server_pool
from pytest_llmperf.launch.server_pool import ServerPool
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch

#: Two ranks that train until they are ended.
ENDLESS = TrainSpec(
    model="llama-tiny", gpus=2, sequence_length=16, steps=100_000, min_steps=100_000, micro_batch_size=1
)

_pools: list[ServerPool] = []


def launch(
    spec: TrainSpec,
    folder: Path,
    watch: Callable[[Progress], None] = lambda _: None,
    *,
    start: str = "warm",
    **more: Any,
) -> Launch | Failure:
    """One launch on the CPU, with ``more`` of its request. One in another environment begins sooner ``cold``."""
    warm = WarmStart(_pool(), _refuse, is_required=True) if start == "warm" else None
    values = {"timeout_seconds": 240.0, **more}
    return LocalLauncher().launch(LaunchRequest(spec=spec, folder=folder, gpus=(), warm=warm, **values), watch)


def launched(spec: TrainSpec, folder: Path, *, start: str = "warm", **more: Any) -> Launch:
    """One that ended well."""
    record = launch(spec, folder, start=start, **more)
    assert isinstance(record, Launch), record
    return record


def close() -> None:
    """End the server; the next launch has another."""
    while _pools:
        _pools.pop().close()


def _pool() -> ServerPool:
    if not _pools:
        home = Path(tempfile.mkdtemp(prefix="fork-servers-"))
        _pools.append(server_pool(lambda: home))
    return _pools[0]


def _refuse(line: str) -> None:
    raise AssertionError(line)
