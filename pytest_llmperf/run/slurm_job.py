"""A run inside a SLURM job: where it launches, what ends it early, and what it leaves for the next start."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.slurm.allocation import Allocation, AllocationError, NoNodeAnswersError, job_key, listed
from pytest_llmperf.launch.slurm.cluster import Cluster, find_cluster
from pytest_llmperf.launch.slurm.launcher import SlurmLauncher
from pytest_llmperf.launch.slurm.lost_nodes import unreachable
from pytest_llmperf.launch.slurm.node_servers import NodeServers
from pytest_llmperf.launch.slurm.site_options import SlurmOptions
from pytest_llmperf.launch.slurm.srun import Srun
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.errors import UsageError
from pytest_llmperf.run.journal import Journal, Kept


class AllNodesLostError(Exception):
    """No node of the job starts anything any more: another start of it gets others."""


def hold(launcher: str, options: SlurmOptions, gpus: int | None) -> Cluster:
    """The allocation around this process, found fit for ``--gpus``.

    Raises:
        UsageError: there is none, or no figure may come from it.
        AllNodesLostError: there was one.
    """
    try:
        cluster = find_cluster(options)
        cluster.check(on_cpu=gpus == 0)
    except NoNodeAnswersError as error:
        nodes = Allocation.of(os.environ).nodes
        if unreachable(nodes) == nodes:
            raise AllNodesLostError(f"node {listed(nodes)} failed, and the job has no other") from None
        raise UsageError(f"--perf-launcher {launcher}: {error}") from None
    except AllocationError as error:
        raise UsageError(f"--perf-launcher {launcher}: {error}") from None
    return cluster


class Job:
    """The SLURM job of this run, through its requeues."""

    def __init__(self, folder: Path, variables: Mapping[str, str], arguments: tuple[str, ...], *, resume: bool) -> None:
        self._job_id = variables["SLURM_JOB_ID"]
        restarts = variables.get("SLURM_RESTART_COUNT", "0")
        self._restarts = int(restarts) if restarts.isdigit() else 0
        self.journal = Journal(folder / "jobs", job_key(variables), arguments, resume=resume)
        self._gpus, self._start = 0, time.time()

    def holds(self, gpus: int) -> None:
        """As many GPUs are charged for as long as this process runs; a job that shrinks has other processes then."""
        self._gpus, self._start = gpus, controller.start_time(self._job_id)

    def launcher(
        self, srun: Srun, servers: NodeServers | None, *, budget_gpu_hours: float | None, say: Callable[[str], None]
    ) -> SlurmLauncher:
        """What starts this job's launches, warm where there are ``servers``, until the budget is used up."""
        ends = None
        if budget_gpu_hours is not None and self._gpus:
            spent, until = self._noted()
            spent += self.journal.spent_before(self._restarts)
            if math.isinf(spent):
                say(f"{self.journal.folder}/spent-*.json: no number of GPU-hours; --perf-budget is taken as used up")
            left = budget_gpu_hours - spent
            ends = max(until, self._start) + max(0.0, left) * 3600 / self._gpus
        for node in srun.cluster.lost:
            say(f"node {node} did not answer and is left out")
        return SlurmLauncher(srun, say=say, servers=servers, budget_ends=ends)

    def keep(self, kept: Kept) -> str:
        """Write down what was concluded, and what was spent so far: a node that dies tells nothing any more."""
        self.note_spent()
        return self.journal.keep(kept)

    def begun(self, nodeid: str, digest: str) -> tuple[Launch, ...]:
        """Launches of a case that an earlier start of the job did not conclude."""
        return self.journal.begun(nodeid, digest, self._restarts)

    def begin(self, nodeid: str, digest: str, launches: Sequence[Launch]) -> None:
        """Note what a case has launched."""
        self.journal.begin(nodeid, digest, self._restarts, launches)

    def note_spent(self) -> None:
        """GPU-hours so far, idle ones too: they are what the job is charged for."""
        if self._gpus:
            (spent, until), now = self._noted(), time.time()
            if math.isinf(spent):
                return  # the note could not be read just now, or makes no sense: nothing better is known to put there
            # From where the last note ended, whoever wrote it: processes side by side count their time once.
            self.journal.note_spent(self._restarts, spent + self._gpus * max(0.0, now - until) / 3600, max(now, until))

    def _noted(self) -> tuple[float, float]:
        """GPU-hours of this start, and until when they count."""
        return self.journal.spent_in(self._restarts) or (0.0, self._start)
