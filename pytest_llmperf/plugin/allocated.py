"""A run inside a SLURM job: whether it launches by srun, what ends it early, and what it leaves for the next start."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import pytest

from pytest_llmperf.launch import scheduler
from pytest_llmperf.launch.allocation import AllocationError, job_key
from pytest_llmperf.launch.cluster import Cluster, SlurmOptions, find_cluster
from pytest_llmperf.launch.slurm import SlurmLauncher
from pytest_llmperf.plugin.journal import Journal

#: The run ended before its end and can go on: time limit, preemption, scancel. Shells know 75 as "try again later".
UNFINISHED = 75
#: The GPU-hours are used up: another start would change nothing.
OVER_BUDGET = 76

# The step of `salloc`'s shell, from which further steps may start, unlike from any other.
_INTERACTIVE_STEP = "4294967290"


def uses_slurm(launcher: str, variables: Mapping[str, str]) -> bool:
    """Whether launches go through srun: ``auto`` does so in a job's script, and not inside a step of it."""
    if launcher != "auto":
        return launcher == "slurm"
    in_step = variables.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP
    in_job = bool(variables.get("SLURM_JOB_ID")) and not in_step
    # Without srun a job of one node is a machine like any other; one of several must not quietly use the first.
    return in_job and (shutil.which("srun") is not None or variables.get("SLURM_JOB_NUM_NODES", "1") != "1")


def hold(launcher: str, options: SlurmOptions, gpus: int | None) -> Cluster:
    """The allocation around this process, found fit for ``--gpus``.

    Raises:
        pytest.UsageError: there is none, or no figure may come from it.
    """
    try:
        cluster = find_cluster(options)
        cluster.check(on_cpu=gpus == 0)
    except AllocationError as error:
        raise pytest.UsageError(f"--perf-launcher {launcher}: {error}") from None
    return cluster


class Job:
    """The SLURM job of this run, through its requeues."""

    def __init__(self, folder: Path, variables: Mapping[str, str], arguments: tuple[str, ...], *, resume: bool) -> None:
        self._job_id = variables["SLURM_JOB_ID"]
        restarts = variables.get("SLURM_RESTART_COUNT", "0")
        self._restarts = int(restarts) if restarts.isdigit() else 0
        self.journal = Journal(folder / "jobs", job_key(variables), arguments, resume=resume)
        self._gpus, self._start = 0, time.time()

    def launcher(
        self,
        cluster: Cluster,
        options: SlurmOptions,
        *,
        on_cpu: bool,
        budget_gpu_hours: float | None,
        say: Callable[[str], None],
    ) -> SlurmLauncher:
        """What starts this job's launches, until the budget is used up."""
        self._gpus, self._start = len(cluster.machine.gpus), scheduler.start_time(self._job_id)
        ends = None
        if budget_gpu_hours is not None and self._gpus:
            left = budget_gpu_hours - self.journal.spent_before(self._restarts)
            ends = self._start + max(0.0, left) * 3600 / self._gpus
        for node in cluster.lost:
            say(f"node {node} did not answer and is left out")
        return SlurmLauncher(cluster, options, on_cpu=on_cpu, say=say, budget_ends=ends)

    def note_spent(self) -> None:
        """GPU-hours so far, idle ones too: they are what the job is charged for."""
        if self._gpus:
            self.journal.note_spent(self._restarts, self._gpus * (time.time() - self._start) / 3600)


def end_on_signals(ended_by: Callable[[str], None]) -> Callable[[], None]:
    """Let SIGTERM (scancel, preemption) and SIGUSR1 (``sbatch --signal``) end the run as Ctrl-C does, and say so.

    Returns what makes them mean again what they meant before.
    """

    before = {known: signal.getsignal(known) for known in _SIGNALS}

    def handler(number: int, _frame: FrameType | None) -> None:
        for known in _SIGNALS:
            signal.signal(known, signal.SIG_IGN)  # SLURM repeats itself, and the ending must come to its end
        ended_by(signal.Signals(number).name)
        raise KeyboardInterrupt

    try:
        for known in _SIGNALS:
            signal.signal(known, handler)
    except ValueError:  # not the main thread: whoever embeds pytest there minds its signals
        return lambda: None

    def restore() -> None:
        for known, earlier in before.items():
            signal.signal(known, earlier)

    return restore


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
