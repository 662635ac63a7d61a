"""SlurmSite: the nodes of the SLURM job around this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NoReturn

from pytest_llmperf.launch.fork_servers import WarmStart
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.launch.site import AllNodesLostError, Say, Site, SiteError, Wanted, Watch, listed
from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.slurm.allocation import Allocation, NoNodeAnswersError, job_key
from pytest_llmperf.launch.slurm.cluster import Cluster, Srun, find_cluster
from pytest_llmperf.launch.slurm.launcher import SlurmLauncher
from pytest_llmperf.launch.slurm.node_servers import NodeServers
from pytest_llmperf.launch.slurm.step_outcome import unreachable
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.launch import Launch

# What a job was asked for, of what its variables tell.
_ASKED = {
    "--account": "SLURM_JOB_ACCOUNT",
    "--partition": "SLURM_JOB_PARTITION",
    "--qos": "SLURM_JOB_QOS",
    "--reservation": "SLURM_JOB_RESERVATION",
    "--cpus-per-task": "SLURM_CPUS_PER_TASK",
}


class SlurmSite(Site):
    """A job's nodes, as a ``Site``."""

    is_here = False
    for_more = "ask sbatch for more with --nodes and --gres"

    def __init__(self, wanted: Wanted, variables: Mapping[str, str]) -> None:
        self._wanted = wanted
        self.key = job_key(variables)
        restarts = variables.get("SLURM_RESTART_COUNT", "0")
        self.restarts = int(restarts) if restarts.isdigit() else 0
        self._all_lost: AllNodesLostError | None = None
        self._launcher: SlurmLauncher | None = None
        self._said: set[str] = set()

    @cached_property
    def cluster(self) -> Cluster:
        """The allocation, found fit; raises as ``Site.machine``."""
        if self._all_lost is not None:
            raise self._all_lost  # asked again, they would take as long
        try:
            cluster = find_cluster(self._wanted.slurm)
        except NoNodeAnswersError:
            nodes = Allocation.from_variables(os.environ).nodes
            if unreachable(nodes) != nodes:
                raise
            self._all_lost = AllNodesLostError(f"node {listed(nodes)} failed, and the job has no other")
            raise self._all_lost from None
        cluster.check(on_cpu=self._wanted.gpus == 0)
        return cluster

    @property
    def where(self) -> str:
        return f"in SLURM job {self.cluster.allocation.job_id}"

    def machine(self) -> Machine:
        return self.cluster.machine

    def began(self) -> float:
        return controller.start_time(self.cluster.allocation.job_id)

    def words_for_as_much(self, variables: Mapping[str, str]) -> list[str]:
        cluster = self.cluster
        words = [f"--nodes={len(cluster.allocation.nodes)}", f"--ntasks-per-node={cluster.tasks_per_node}"]
        words += [f"{option}={variables[name]}" for option, name in _ASKED.items() if variables.get(name)]
        granted = cluster.nodes[0].granted_gpus
        return ["salloc", *words, *([f"--gres=gpu:{granted}"] if granted else [])]

    @cached_property
    def _srun(self) -> Srun:
        on_cpu = self._wanted.gpus == 0 or not self.cluster.machine.gpus
        return Srun(cluster=self.cluster, options=self._wanted.slurm, on_cpu=on_cpu)

    @cached_property
    def _servers(self) -> NodeServers | None:
        return None if self._wanted.start == "cold" else NodeServers(self._srun, self._wanted.folder)

    def prepare(self, pythons: Sequence[str], *, on_cpu: bool) -> None:  # noqa: ARG002 - a node has one for itself
        if self._servers is not None:
            self._servers.prepare()

    def warm_start(self, say: Say) -> WarmStart | None:
        return WarmStart.asked(self._wanted.start, None, say, self._said)

    @contextmanager
    def lease(self, *_: object, **__: object) -> Iterator[tuple[()]]:
        yield ()  # each launch leases its nodes

    def launch(self, request: LaunchRequest, watch: Watch, say: Say) -> Launch | Failure:
        if self._launcher is None:  # one for the whole run, which remembers its nodes
            ends = self._wanted.budget_ends(say)
            for node in self.cluster.lost:
                say(f"node {node} did not answer and is left out")
            self._launcher = SlurmLauncher(self._srun, say=say, servers=self._servers, budget_ends=ends)
        return self._launcher.launch(request, watch)

    def sizes(self, *_: object, **__: object) -> NoReturn:
        raise SiteError("this is launched on this machine alone")

    training_errors = sizes

    def close(self) -> None:
        servers = self.__dict__.get("_servers")  # asked for only where it was
        if servers is not None:
            servers.close()
