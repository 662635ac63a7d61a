"""This machine: its launches by torchrun, cold or warm, and what became of them; as a site of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_llmperf.launch import machine as machines
from pytest_llmperf.launch import outcome, process
from pytest_llmperf.launch.device import LOOK_AT, Gpu
from pytest_llmperf.launch.fork_servers import ForkedAgent, ServerPool, State
from pytest_llmperf.launch.machine import Machine, lease_cpu, lease_gpus
from pytest_llmperf.launch.request import (
    REFUSALS,
    LaunchRequest,
    WarmStart,
    server_key,
    torchrun_command,
    worker_environment,
    write_request,
)
from pytest_llmperf.launch.scratch import Scratch, scratch
from pytest_llmperf.launch.script import ScriptLaunch, announced
from pytest_llmperf.launch.site import Say, Site, Wanted, Watch
from pytest_llmperf.launch.watch import HealthWatch, Lap, ProgressReader, with_phases
from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch


@dataclass(frozen=True)
class HostPart:
    """What one host does of a launch: torchrun or a script's own command, with all that it starts."""

    folder: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    script: ScriptLaunch | None
    node: str = ""
    """Of a job; its ranks' pids stand beside those of other hosts."""

    @property
    def log(self) -> Path:
        return self.folder / ("-".join(filter(None, ["torchrun", self.node])) + ".log")

    def run(
        self, agent: ForkedAgent | None, seconds: float, progress: ProgressReader, watched: HealthWatch
    ) -> process.Ended:
        """Let it run to its end, or for so many ``seconds``; ``agent``: it was begun warm."""
        folder, script = self.folder, self.script
        work = script.work if script else None
        how: dict[str, Any] = {"at_timeout": lambda torchrun: process.ask_ranks(folder, torchrun, self.node)}
        if script:
            how = script.ends(seconds, progress, self.node)
        ended = process.watch(
            lambda: agent or process.start(self.command, environment=self.environment, log=self.log, folder=work),
            timeout_seconds=seconds,
            pid_files=lambda: () if self.node else folder.glob("rank-*.pid"),
            poll=lambda: watched.look(progress.poll()),
            **how,
        )
        watched.look(progress.read())
        return script.closed(ended, self.gpus) if script else ended


@dataclass(frozen=True)
class _Run:
    """A torchrun that was started and has ended, well or not."""

    ended: process.Ended
    lap: Lap
    health: Health
    progress: Progress
    start: str
    """``warm`` or ``cold``."""


class LocalLauncher:
    """Launches on this machine."""

    def __init__(self, command: Callable[[LaunchRequest], list[str]] = torchrun_command) -> None:
        self._command = command

    def launch(self, request: LaunchRequest, watch: Watch) -> Launch | Failure:
        """The record, or why there is none; whatever happens, no process of the launch is alive afterwards."""
        run = self._run(request, watch)
        if isinstance(run, Failure):
            return run
        result = outcome.read(request.folder, request.spec, run.ended, run.progress)
        if isinstance(result, Launch):
            result = with_phases(result, run.lap, run.progress)
            result = replace(result, evidence={**result.evidence, "start": run.start})
        return replace(result, health=run.health)

    def training_errors(self, request: LaunchRequest, watch: Watch) -> outcome.Errors | Failure:
        """What the small trainings that ``request.parity`` asks for did, or why nothing is known of them."""
        run = self._run(request, watch)
        if isinstance(run, Failure):
            return run
        errors = outcome.read_training_errors(request.folder, run.ended, run.progress)
        return replace(errors, health=run.health) if isinstance(errors, Failure) else errors

    def _run(self, request: LaunchRequest, watch: Watch) -> _Run | Failure:
        progress = ProgressReader(request.folder / "progress.json", watch)
        try:
            with self._prepared(request) as (part, place), request.meter.running() as lap:
                with HealthWatch(request.gpus, request.folder) as watched:
                    agent = request.warm.agent(request, part.environment, progress.poll) if request.warm else None
                    ended = part.run(agent, request.timeout_seconds, progress, watched)
                    health = watched.health()
                if agent and agent.state is State.LOST:
                    ended = replace(ended, where=", whose fork server died,")
                place.is_whole = ended.returncode == 0
            return _Run(ended, lap, health, progress.last, "warm" if agent else "cold")
        except REFUSALS as error:
            return outcome.refused(request.folder, error)

    @contextmanager
    def _prepared(self, request: LaunchRequest) -> Iterator[tuple[HostPart, Scratch]]:
        """What can be had before anything of a launch runs, for as long as that lasts: its files, place and words."""
        write_request(request)
        with scratch() as place, process.lifeline(request.folder) as line:
            script = ScriptLaunch.of(request)
            environment = {**worker_environment(request, os.environ), **place.variables, **request.variables, **line}
            if script:
                environment = script.environment(environment)
                script.check(environment["PATH"])
            command = script.command if script else self._command(request)
            yield HostPart(request.folder, command, environment, request.gpus, script), place


class LocalSite(Site):
    """This machine, as a ``Site``: nobody counts its hours, and no command line gets more of it."""

    is_here = True
    key, restarts = "", 0
    where = "visible here"
    for_more = f"check {LOOK_AT}"

    def __init__(self, wanted: Wanted) -> None:
        self._wanted, self._servers = wanted, ServerPool(wanted.folder)
        self._said: set[str] = set()

    def machine(self) -> Machine:
        return machines.find_machine()

    def prepare(self, pythons: Sequence[str], *, on_cpu: bool) -> None:
        for python in dict.fromkeys(pythons) if self._wanted.start != "cold" else ():
            self._servers.prepare(server_key(python, os.environ, on_gpu=not on_cpu))

    def warm_start(self, say: Say) -> WarmStart | None:
        start = self._wanted.start
        return None if start == "cold" else WarmStart(self._servers, say, is_required=start == "warm", said=self._said)

    @contextmanager
    def lease(
        self, num_gpus: int, gpus: Sequence[Gpu], say: Say, *, shared: bool, wait: Callable[[str], None]
    ) -> Iterator[tuple[Gpu, ...]]:
        if gpus:
            with lease_gpus(num_gpus, gpus, say, shared=shared, wait=wait) as leased:
                yield leased
        else:
            with lease_cpu(say, shared=shared, wait=wait):
                yield ()

    def launch(self, request: LaunchRequest, watch: Watch, say: Say) -> Launch | Failure:
        with announced(request, say, self._said):
            return LocalLauncher().launch(request, watch)

    def training_errors(self, request: LaunchRequest, watch: Watch) -> outcome.Errors | Failure:
        return LocalLauncher().training_errors(request, watch)

    def close(self) -> None:
        self._servers.close()
