"""What SLURM gave this job: nodes and what each offers, read from its variables. Pure.

On a GPU an offer is counted in GPUs, on the CPU in tasks, as ``sbatch --ntasks-per-node`` asked for them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from pytest_llmperf.launch.site import SiteError

_SPAN, _COUNT = re.compile(r"(\d+)(?:-(\d+))?"), re.compile(r"(\d+)(?:\(x(\d+)\))?")
# The step of `salloc`'s shell, from which further steps may start, unlike from any other.
_INTERACTIVE_STEP = "4294967290"


class AllocationError(SiteError):
    """The allocation cannot serve, in one line."""


class NoNodeAnswersError(AllocationError):
    """Whatever the nodes are, none of them says so."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One job's nodes."""

    job_id: str
    key: str
    """Names the job through a requeue, and each task of an array apart: ``1234`` or ``1200_8``."""
    nodes: tuple[str, ...]
    """By SLURM's names, in its order."""
    tasks_per_node: tuple[int, ...]
    cpus_per_node: tuple[int, ...]

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Allocation:
        """The one around this process; AllocationError where there is none, or its variables contradict one another."""
        job_id, nodelist = variables.get("SLURM_JOB_ID"), variables.get("SLURM_JOB_NODELIST")
        if not job_id or not nodelist:
            raise AllocationError(
                "not inside a SLURM allocation (SLURM_JOB_ID and SLURM_JOB_NODELIST are not set); "
                "start it with sbatch or salloc, or use --perf-launcher local"
            )
        nodes = expand_nodes(nodelist)
        cpus = expand_counts(variables.get("SLURM_JOB_CPUS_PER_NODE", "")) or (1,) * len(nodes)
        # A job that was shrunk has lost the second, and keeps what sbatch was asked for. CPUs are no tasks: ranks of
        # several nodes would meet on one.
        tasks = expand_counts(variables.get("SLURM_TASKS_PER_NODE", ""))
        tasks = tasks or expand_counts(variables.get("SLURM_NTASKS_PER_NODE", "")) * len(nodes) or cpus
        for name, counts in (("SLURM_JOB_CPUS_PER_NODE", cpus), ("SLURM_TASKS_PER_NODE", tasks)):
            if len(counts) != len(nodes):
                raise AllocationError(
                    f"SLURM job {job_id}: {name} tells of {len(counts)} nodes, SLURM_JOB_NODELIST of {len(nodes)}; "
                    "after a resize, source the script that scontrol wrote"
                )
        key = job_key(variables) or job_id
        return cls(job_id=job_id, key=key, nodes=nodes, tasks_per_node=tasks, cpus_per_node=cpus)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How the ranks of one launch spread: the same number on each of its nodes."""

    num_nodes: int
    ranks_per_node: int


def place(world_size: int, per_node: int, num_nodes: int) -> Placement | None:
    """The fewest nodes that hold ``world_size`` ranks evenly, ``None`` where ``num_nodes`` do not."""
    for nodes in range(1, num_nodes + 1):
        if world_size % nodes == 0 and world_size // nodes <= per_node:
            return Placement(num_nodes=nodes, ranks_per_node=world_size // nodes)
    return None


def job_key(variables: Mapping[str, str]) -> str:
    """The name of this job's results: the same after a requeue, another for each task of an array; empty: no job."""
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID", "")


def expand_nodes(text: str) -> tuple[str, ...]:
    """``n[1-2,05],m`` as its four names; AllocationError where it is no node list."""
    names: list[str] = []
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):  # at the commas that are outside brackets
        pieces = re.split(r"\[([^\]]*)\]", part)  # each second one was inside
        choices = [_numbers(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        names += map("".join, product(*choices)) if all(choices) else [""]
    if not names or not all(names) or any(set(name) & set("[]") for name in names):
        raise AllocationError(f"SLURM_JOB_NODELIST={text}: not a list of nodes, expected e.g. n[1-2,05]")
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """``2(x3),4`` as (2, 2, 2, 4); what is no such list is empty."""
    found = [_COUNT.fullmatch(part) for part in filter(None, text.split(","))]
    return tuple(int(match[1]) for match in found if match for _ in range(int(match[2] or 1))) if all(found) else ()


def _numbers(text: str) -> list[str]:
    """``1-2,05`` as three numbers, of whose name leading zeros are a part; what are none are empty."""
    found = [_SPAN.fullmatch(span) for span in text.split(",")]
    spans = [(match[1], int(match[1]), int(match[2] or match[1])) for match in found if match]
    return [f"{n:0{len(name)}d}" for name, first, last in spans for n in range(first, last + 1)] if all(found) else []


def uses_slurm(launcher: str, variables: Mapping[str, str]) -> bool:
    """Whether launches go through srun: ``auto`` does so in a job's script, and not inside a step of it."""
    if launcher != "auto":
        return launcher == "slurm"
    in_step = variables.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP
    in_job = bool(variables.get("SLURM_JOB_ID")) and not in_step
    # Without srun a job of one node is a machine like any other; one of several must not quietly use the first.
    return in_job and (shutil.which("srun") is not None or variables.get("SLURM_JOB_NUM_NODES", "1") != "1")
