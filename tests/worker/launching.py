"""Launches that tests make by themselves: warm ones from a fork server that all tests of a session share, or cold."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch.fork_servers import ServerPool
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest, WarmStart
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.spec import Spec

#: Two ranks that train until they are ended.
ENDLESS = TrainSpec(
    model="llama-tiny", gpus=2, sequence_length=16, steps=100_000, min_steps=100_000, micro_batch_size=1
)

_pools: list[tuple[ServerPool, Path]] = []


def launch(
    spec: Spec,
    folder: Path,
    watch: Callable[[Progress], None] = lambda _: None,
    *,
    start: str = "warm",
    **more: Any,
) -> Launch | Failure:
    """One launch on the CPU, with ``more`` of its request. One in another environment begins sooner ``cold``."""
    warm = WarmStart(shared_pool()[0], _refuse, is_required=True) if start == "warm" else None
    values = {"timeout_seconds": 240.0, **more}
    return LocalLauncher().launch(LaunchRequest(spec=spec, folder=folder, gpus=(), warm=warm, **values), watch)


def launched(spec: Spec, folder: Path, *, start: str = "warm", **more: Any) -> Launch:
    """One that ended well."""
    record = launch(spec, folder, start=start, **more)
    assert isinstance(record, Launch), record
    return record


def shared_pool() -> tuple[ServerPool, Path]:
    """The session's servers, and where they leave their logs."""
    if not _pools:
        home = Path(tempfile.mkdtemp(prefix="fork-servers-"))
        _pools.append((ServerPool(lambda: home), home))
    return _pools[0]


def shared_processes() -> set[int]:
    """The pids of those servers, and of what they have forked."""
    found: set[int] = set()
    for pool, _ in _pools:
        for server in pool._servers.values():
            with suppress(psutil.NoSuchProcess):
                found |= {server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))}
    return found


def close() -> None:
    """End the servers; the next launch has another."""
    while _pools:
        _pools.pop()[0].close()


def _refuse(line: str) -> None:
    raise AssertionError(line)
