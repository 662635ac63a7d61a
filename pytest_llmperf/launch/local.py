"""One launch on this machine: torchrun, its run folder, and what became of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pytest_llmperf.launch import outcome, process
from pytest_llmperf.launch.machine import Gpu, foreign_processes
from pytest_llmperf.launch.progress import ProgressReader
from pytest_llmperf.measurement import Failure, Health, Launch, Progress
from pytest_llmperf.spec import TrainSpec

_PACKAGE_PARENT = Path(__file__).parents[2]

# What an enclosing torchrun or scheduler step set for its own ranks.
_NOT_INHERITED = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE GROUP_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT".split()
)


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What to launch, on what, and where to leave its files."""

    spec: TrainSpec
    folder: Path
    """Made by the launcher; holds request, logs and records."""
    gpus: tuple[Gpu, ...]
    """Leased for this launch; empty is the CPU."""
    timeout_seconds: float
    python: str = sys.executable


class Launcher(Protocol):
    """Starts a launch and waits for it."""

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        """The record, or why there is none; ``watch`` is told of progress while it runs."""


def torchrun_command(request: LaunchRequest) -> list[str]:
    """torchrun on one machine: a rendezvous of its own on a free port, each rank's output in its own file."""
    return [
        *(request.python, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"),
        *(f"--nproc-per-node={request.spec.gpus}", "--max-restarts=0"),
        *(f"--log-dir={request.folder / 'logs'}", "--redirects=3"),
        *("-m", "pytest_llmperf.worker", str(request.folder)),
    ]


class LocalLauncher:
    """Launches on this machine."""

    def __init__(self, command: Callable[[LaunchRequest], list[str]] = torchrun_command) -> None:
        self._command = command

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        """See ``Launcher``; whatever happens, no process of the launch is alive afterwards."""
        folder = request.folder
        foreign = foreign_processes(request.gpus)
        progress = ProgressReader(folder / "progress.json", watch)
        try:
            folder.mkdir(parents=True)
            _write_request(request)
            ended = process.run(
                self._command(request),
                environment=worker_environment(request, os.environ),
                log=folder / "torchrun.log",
                timeout_seconds=request.timeout_seconds,
                pid_files=lambda: folder.glob("rank-*.pid"),
                poll=progress.poll,
            )
        except OSError as error:
            return Failure(
                kind="never-started", message=f"the launch could not be started ({error})", tail=(), folder=str(folder)
            )
        result = outcome.read(folder, request.spec, ended, progress.last)
        if isinstance(result, Failure):
            return result
        return replace(result, wall_seconds=round(ended.seconds, 3), health=Health(foreign_processes=foreign))


def worker_environment(request: LaunchRequest, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of torchrun and its ranks: what was inherited, and what this launch fixes."""
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith("TORCHELASTIC_")
    }
    python_path = [str(_PACKAGE_PARENT), *filter(None, [inherited.get("PYTHONPATH")])]
    environment |= {
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in request.gpus),
        "LLMPERF_LAUNCHER_PID": str(os.getpid()),
        # An uninstalled checkout works too.
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONUNBUFFERED": "1",
    }
    # More threads than cores slow a CPU run down by themselves; on a GPU the host needs few.
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    return environment


def _write_request(request: LaunchRequest) -> None:
    spec = request.spec
    content = {
        "spec": spec.to_dict(),
        "spec_id": spec.id,
        "digest": spec.digest,
        "model_config": dict(spec.architecture.config),
    }
    (request.folder / "request.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
