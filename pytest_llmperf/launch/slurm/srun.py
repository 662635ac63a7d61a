"""Srun: how this run starts steps on the job's nodes, and what of the environment is said to them again."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.launch.scratch import SCRATCH
from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.slurm.cluster import Cluster, passed_on
from pytest_llmperf.launch.slurm.site_options import SlurmOptions


@dataclass(frozen=True, kw_only=True)
class Srun:
    """In one job, at one site."""

    cluster: Cluster
    options: SlurmOptions
    on_cpu: bool

    def python(self, asked: str = sys.executable) -> str:
        """The Python on the nodes, where ``asked`` is wanted."""
        return self.options.python if asked == sys.executable and self.options.python else asked

    def words(self, nodes: Sequence[str], *options: str, name: str, gpus_per_node: int) -> list[str]:
        """srun with one task on each of ``nodes``, which has all the CPUs that the job has there."""
        size = len(nodes)
        return [
            *("srun", f"--nodes={size}", f"--ntasks={size}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"),
            *(f"--cpus-per-task={self.cluster.cpus_per_node}", f"--cpu-bind={self.options.cpu_bind}"),
            # The lease keeps launches apart. SLURM would let none start on nodes of a step that lost another node, for
            # minutes: to it that step still holds them.
            "--overlap",
            # A node that fails must not take the others' last words with it.
            *("--export=ALL", "--kill-on-bad-exit=0", *options),
            *self._generic_resources(gpus_per_node),
            f"--job-name={name}",
            *self.options.srun,
        ]

    def environment(self, worker: Mapping[str, str]) -> dict[str, str]:
        """srun's own, where its tasks are to have the ``worker``'s."""
        environment = controller.step_environment(worker)
        if not self.on_cpu:
            environment.pop("CUDA_VISIBLE_DEVICES", None)
        return environment

    def variables(self, worker: Mapping[str, str]) -> dict[str, str]:
        """What of the ``worker``'s was set by us, and what changes speed of the caller's; said past any container."""
        own = {name: value for name, value in worker.items() if os.environ.get(name) != value}
        found = {**passed_on(dict(os.environ)), **own}
        if not self.on_cpu:
            found.pop("CUDA_VISIBLE_DEVICES", None)  # SLURM sets it, on each node its own
            # NCCL remembers what it was doing, for a rank that hangs.
            found.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
            found.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        if self.options.scratch:
            found[SCRATCH] = self.options.scratch
        return found

    def _generic_resources(self, gpus_per_node: int) -> list[str]:
        if not any(node.granted_gpus for node in self.cluster.nodes):
            return []  # SLURM gives whole nodes here, and knows nothing of GPUs
        return ["--gres=none"] if self.on_cpu else [f"--gres=gpu:{gpus_per_node}"]
