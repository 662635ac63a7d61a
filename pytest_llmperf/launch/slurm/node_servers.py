"""NodeServers: a step of the job, as long as the run, with a server on each node from which launches are forked."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_llmperf.launch.device import NO_GPU
from pytest_llmperf.launch.fork_servers import ColdStartError, needs
from pytest_llmperf.launch.outcome import lines_of
from pytest_llmperf.launch.process import package_path, python_path
from pytest_llmperf.launch.request import LaunchRequest, lasting_environment
from pytest_llmperf.launch.site import listed
from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.slurm.cluster import Srun
from pytest_llmperf.launch.slurm.step_outcome import ended_nodes, wait_for, word, words_of
from pytest_llmperf.settings.train_spec import TrainSpec

# A node takes seconds to start a step; the first of a night, from a shared file system, more.
_BEGIN_SECONDS = 60.0
# Each node ends its servers, which hold nothing then.
_END_SECONDS = 30.0
# After so many there is something about this site that somebody has to look at.
_MOST_STEPS = 3


class NodeServers:
    def __init__(self, srun: Srun, folder: Callable[[], Path]) -> None:
        """``folder``, on the shared file system, is where they leave logs."""
        self._srun, self._folder = srun, folder
        self._step: _Step | None = None
        self._num_steps = 0
        self._why_none = ""

    def prepare(self) -> None:
        """Let them begin their imports, on all nodes; why they cannot is told to the launch that wants them."""
        with suppress(ColdStartError):
            self._running([node.node for node in self._srun.cluster.nodes])

    def offer(self, request: LaunchRequest, nodes: Sequence[str], left: Sequence[str]) -> list[str]:
        """Words by which the agents of a launch on ``nodes``, of those ``left``, find their servers: whether it must
        begin warm, their name, and its needs. None: it begins cold. ColdStartError where it must not."""
        if request.warm is None or not isinstance(request.spec, TrainSpec):
            return []
        try:
            step = self._running(left)
            if silent := step.silent(nodes):
                said = word(step.said) or "nothing was said"
                self._why_none = f"no fork server began on node {listed(silent)} ({said})"
                self.give_up()
                raise ColdStartError(self._why_none)
        except ColdStartError as error:
            request.warm.cold(str(error))
            return []
        return ["warm" if request.warm.is_required else "auto", step.name, *needs(request.spec)]

    def note_end(self, request: LaunchRequest, nodes: Sequence[str]) -> None:
        """Say why nodes began cold that were to begin warm; where a server is gone, the next launch has others."""
        ends = words_of(request.folder, nodes)
        for node, end in ends.items():
            if end.get("cold_because") and request.warm is not None:
                request.warm.tell(f"on node {node}: {end['cold_because']}")
        if any(end.get("is_server_gone") or end.get("lost_server") for end in ends.values()):
            self.give_up()

    def give_up(self) -> None:
        """End those that there are, since one of them is gone; the next launch has others."""
        if self._step is not None:
            self._step.end()
            self._step = None

    def close(self) -> None:
        """End them; what is launched later begins cold."""
        self._why_none = "the run is at its end"
        self.give_up()

    def _running(self, nodes: Sequence[str]) -> _Step:
        if self._step is not None and self._step.has_ended:
            self.give_up()
        if self._step is None and self._num_steps == _MOST_STEPS:
            self._why_none = self._why_none or f"the nodes' fork servers ended {_MOST_STEPS} times"
        if self._why_none:
            raise ColdStartError(self._why_none)
        if self._step is None:
            self._num_steps += 1
            try:
                folder = self._folder() / f"fork-servers-{self._num_steps}"
                folder.mkdir()
                self._step = _Step(self._srun, nodes, folder)
            except OSError as error:
                self._why_none = f"no fork server could be started on the nodes ({error})"
                raise ColdStartError(self._why_none) from None
        return self._step


class _Step:
    """One srun that runs until its standard input is closed: by us, or by the kernel when this process is gone."""

    def __init__(self, srun: Srun, nodes: Sequence[str], folder: Path) -> None:
        self.name = f"llmperf-servers-{secrets.token_hex(8)}"
        self._job_id = srun.cluster.allocation.job_id
        self._folder, self._log = folder, folder / "srun.log"
        self._until = time.monotonic() + _BEGIN_SECONDS
        environment = lasting_environment(os.environ, {})
        environment |= python_path(package_path(), environment)
        if srun.on_cpu:
            environment |= NO_GPU
        server = [srun.python(), "-m", "pytest_llmperf.launch.slurm.node", "server"]
        server += [self.name, str(folder), "cpu" if srun.on_cpu else "gpu", srun.python()]
        # Each lasts for itself: neither a node nor a server that fails ends the others.
        lasting, stdin, gpus = ("--wait=0", "--no-kill"), subprocess.PIPE, srun.cluster.gpus_per_node
        self._process = srun.start(
            self.name, nodes, server, *lasting, worker=environment, gpus_per_node=gpus, log=self._log, stdin=stdin
        )
        self._lifeline: Any = self._process.stdin

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def said(self) -> Sequence[str]:
        return lines_of(self._log)

    def silent(self, nodes: Sequence[str]) -> list[str]:
        """Those of ``nodes`` whose server has not begun; they are waited for, as long as that may take."""

        def missing() -> list[str]:
            return [node for node in nodes if not (self._folder / node).exists()]

        wait_for(
            lambda: not missing() or self.has_ended or not ended_nodes("\n".join(self.said)).isdisjoint(nodes),
            self._folder,
            self._until - time.monotonic(),
        )
        return missing()

    def end(self) -> None:
        with suppress(OSError):
            self._lifeline.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            controller.cancel_step(self._job_id, self.name)
            self._process.kill()
            self._process.wait()
