"""This machine: its launches by torchrun, cold or warm, and what became of them; as a site of runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pytest_llmperf.launch import machine as machines
from pytest_llmperf.launch import outcome, process
from pytest_llmperf.launch import request as requests
from pytest_llmperf.launch.device import LOOK_AT, Gpu, has_room, wait_until_left
from pytest_llmperf.launch.fork_servers import ForkedAgent, ServerPool
from pytest_llmperf.launch.request import LaunchRequest, WarmStart, worker_environment
from pytest_llmperf.launch.scratch import scratch
from pytest_llmperf.launch.script import ScriptLaunch, announced
from pytest_llmperf.launch.site import Say, Site, Wanted, Watch
from pytest_llmperf.launch.watch import Former, HealthWatch, Lap, ProgressReader, with_phases
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import RECORD_FILE, TURN_FILE, Launch, soak_seconds_of

T = TypeVar("T")

# Before it has made a step a script gets half of its time, and no less than the first; between two a soak this share.
_FIRST_SECONDS, _LEAST_SECONDS, _STILL = 300.0, 60.0, 1 / 6


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
    leaves: bool = False
    """Whether one that began warm is over with its record, and its processes end by themselves."""

    @cached_property
    def soak_seconds(self) -> float:
        """For how long it takes steps before it is ended; 0: it ends by itself."""
        return soak_seconds_of(self.folder)

    @property
    def log(self) -> Path:
        return self.folder / ("-".join(filter(None, ["torchrun", self.node])) + ".log")

    def run(
        self, agent: ForkedAgent | None, seconds: float, progress: ProgressReader, watch: HealthWatch
    ) -> process.Ended:
        """Let it run to its end, or for so many ``seconds``; ``agent``: it was begun warm."""
        folder, script = self.folder, self.script
        work = script.work if script else None
        limit = max(seconds - self.soak_seconds, _LEAST_SECONDS)
        ended = process.watch(
            lambda: agent or process.start(self.command, environment=self.environment, log=self.log, folder=work),
            timeout_seconds=seconds,
            pid_files=lambda: () if self.node else folder.glob("rank-*.pid"),
            poll=lambda: watch.look(progress.poll()),
            leaves=lambda: self.leaves and agent is not None and (folder / RECORD_FILE).exists(),
            is_over=lambda: (script is not None and script.is_over()) or self._is_soaked(progress.last),
            stuck=lambda lasted: self._stuck(lasted, limit, progress.last),
            at_timeout=lambda pid: script.ask(self.node) if script else process.ask_ranks(folder, pid, self.node),
            tree=script.tree() if script else None,
        )
        ended = replace(ended, is_soaked=not ended.timed_out and self._is_soaked(progress.last))
        watch.look(progress.read())
        return script.closed(ended, self.gpus) if script else ended

    def _is_soaked(self, last: Progress) -> bool:
        """Whether a step has ended beyond its minutes: one that is on its way may hang."""
        return 0 < self.soak_seconds < last.trained_seconds

    def _stuck(self, lasted: float, limit: float, last: Progress) -> float:
        """Seconds for which it has made no step, where these are too many."""
        if last.step:
            still = time.time() - last.stepped
            return still if self.soak_seconds and still > limit * _STILL else 0.0
        return lasted if lasted > (max(limit / 2, _FIRST_SECONDS) if self.script else limit) else 0.0


class LocalLauncher:
    def __init__(self, command: Callable[[LaunchRequest], list[str]] = requests.torchrun_command) -> None:
        self._command = command

    def launch(self, request: LaunchRequest, watch: Watch) -> Launch | Failure:
        """The record, or why there is none; whatever happens, no process of the launch is alive afterwards."""

        def read(ended: process.Ended, last: Progress, lap: Lap, start: str) -> Launch | Failure:
            result = outcome.read(request.folder, request.spec, ended, last)
            if isinstance(result, Failure):
                return result
            result = with_phases(result, lap, last)
            return replace(result, evidence={**result.evidence, "start": start})

        return self._run(request, watch, read)

    def training_errors(self, request: LaunchRequest, watch: Watch) -> outcome.Errors | Failure:
        """What the small trainings that ``request.parity`` asks for did, or why nothing is known of them."""
        return self._run(request, watch, lambda end, last, *_: outcome.read_training_errors(request.folder, end, last))

    def _run(
        self, request: LaunchRequest, watch: Watch, read: Callable[[process.Ended, Progress, Lap, str], T | Failure]
    ) -> T | Failure:
        """What is ``read`` of a torchrun that has ended, well or not, how far it had come, when, and how it began."""
        progress, former = ProgressReader(request.folder / "progress.json", watch), request.former
        try:
            with ExitStack() as held:
                requests.write_request(request)
                place, line = held.enter_context(scratch()), held.enter_context(process.lifeline(request.folder))
                part = self._prepared(request, {**place.variables, **request.variables, **line})
                # A context has room beside what the launch that leaves has not given back yet.
                is_beside = former and former.is_leaving and former.of == request.gpus
                fits = is_beside and request.warm and has_room(request.gpus)
                if former and former.is_leaving and not fits:
                    with request.meter.waiting():
                        former.gone()
                with request.meter.running() as lap:
                    agent = self._begun(request, part.environment, progress)
                    with HealthWatch(request.gpus, request.folder) as watched:
                        ended = part.run(agent, request.timeout_seconds, progress, watched)
                        health = watched.health()
                if agent and agent.is_lost:
                    ended = replace(ended, where=", whose fork server died,")
                place.is_whole = ended.returncode == 0
                if former and request.warm and agent and ended.left:
                    held.callback(wait_until_left, request.gpus, {one.pid for one in ended.left})
                    former.of = request.gpus
                    former.leaves(agent, ended, held.pop_all(), request.warm.say, request.spec.id, request.folder)
            found = read(ended, progress.last, lap, "warm" if agent else "cold")
            return replace(found, health=health) if isinstance(found, Launch | Failure) else found
        except requests.REFUSALS as error:
            return outcome.refused(request.folder, error)

    @staticmethod
    def _begun(request: LaunchRequest, environment: Mapping[str, str], progress: ProgressReader) -> ForkedAgent | None:
        """torchrun, begun warm; its ranks touch nothing before the former launch is gone. ``None``: it begins cold."""
        former, warm, agent = request.former, request.warm, None
        is_leaving = former is not None and former.is_leaving
        try:
            with process.locked(request.folder / TURN_FILE) if is_leaving else nullcontext() as is_held:
                if former and not is_held:
                    former.gone()
                    (request.folder / TURN_FILE).unlink(missing_ok=True)  # ranks could not lock it either
                agent = warm.agent(request, environment, progress.poll) if warm else None
                if former:
                    former.gone()
        except BaseException:  # Ctrl-C
            if agent:
                process.reap(agent, set)
            raise
        return agent

    def _prepared(self, request: LaunchRequest, variables: Mapping[str, str]) -> HostPart:
        """What a launch runs, and with what words; ``variables`` are those of its place, its own and its lifeline's."""
        environment, script = {**worker_environment(request, os.environ), **variables}, ScriptLaunch.of(request)
        if script:
            environment = script.environment(environment)
            script.check(environment["PATH"])
        command, leaves = script.command if script else self._command(request), request.former is not None
        return HostPart(request.folder, command, environment, request.gpus, script, leaves=leaves)


class LocalSite(Site):
    """This machine, as a ``Site``: nobody counts its hours, and no command line gets more of it."""

    is_here = True
    key = ""
    where = "visible here"
    for_more = f"check {LOOK_AT}"

    def __init__(self, wanted: Wanted) -> None:
        self._wanted, self._former = wanted, Former()
        self._servers = ServerPool(wanted.folder, before_end=self._former.gone)
        self._said: set[str] = set()
        self._asked: tuple[int, Sequence[Gpu], bool] | None = None
        self._leased: tuple[Gpu, ...] = ()

    def machine(self) -> machines.Machine:
        return machines.find_machine()

    def prepare(self, pythons: Sequence[str], *, on_cpu: bool) -> None:
        for python in dict.fromkeys(pythons) if self._wanted.start != "cold" else ():
            self._servers.prepare(requests.server_key(python, os.environ, on_gpu=not on_cpu))

    def warm_start(self, say: Say) -> WarmStart | None:
        start = self._wanted.start
        return None if start == "cold" else WarmStart(self._servers, say, is_required=start == "warm", said=self._said)

    @contextmanager
    def lease(
        self, num_gpus: int, gpus: Sequence[Gpu], say: Say, *, shared: bool, wait: Callable[[str], None]
    ) -> Iterator[tuple[Gpu, ...]]:
        asked = num_gpus, gpus, shared
        with ExitStack() as stack:
            kept = self._former.handed() if self._asked == asked and not machines.is_awaited(gpus) else None
            if kept is not None:
                stack.push(kept)
            else:
                self._former.gone()  # one of our own would wait for itself
                own: AbstractContextManager[tuple[Gpu, ...]] = machines.lease_cpu(say, shared=shared, wait=wait)
                if gpus:
                    own = machines.lease_gpus(num_gpus, gpus, say, shared=shared, wait=wait)
                self._asked, self._leased = asked, stack.enter_context(own)
            try:
                yield self._leased
            finally:
                if self._former.is_leaving:
                    self._former.keep(stack)

    def launch(self, request: LaunchRequest, watch: Watch, say: Say) -> Launch | Failure:
        with announced(request, say, self._said):
            former = self._former if self._wanted.overlap else None
            return LocalLauncher().launch(replace(request, former=former), watch)

    def training_errors(self, request: LaunchRequest, watch: Watch) -> outcome.Errors | Failure:
        self._former.gone()
        return LocalLauncher().training_errors(request, watch)

    def bad_ends(self) -> Sequence[str]:
        self._former.gone()
        return self._former.bad_ends

    def close(self) -> None:
        try:
            self._former.gone()
        finally:
            self._servers.close()
