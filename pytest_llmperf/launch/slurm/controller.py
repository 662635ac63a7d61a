"""The job: what its variables say that it holds, and what SLURM's controller is asked, which may not answer.

On a GPU what a node offers is counted in GPUs, on the CPU in tasks, as ``sbatch --ntasks-per-node`` asked for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import product

from pytest_llmperf.launch.site import SiteError

_SPAN, _COUNT = re.compile(r"(\d+)(?:-(\d+))?"), re.compile(r"(\d+)(?:\(x(\d+)\))?")
# The step of `salloc`'s shell, from which further steps may start, unlike from any other.
_INTERACTIVE_STEP = "4294967290"

_ran = partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)


class AllocationError(SiteError):
    """The allocation cannot serve, in one line."""


class NoNodeAnswersError(AllocationError):
    """Whatever the nodes are, none of them says so."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
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
        # A job that was shrunk has lost the second, and keeps what sbatch was asked for. CPUs are no tasks.
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


def place(world_size: int, per_node: int, num_nodes: int) -> int | None:
    """The fewest nodes that hold ``world_size`` ranks evenly, ``None`` where ``num_nodes`` do not."""
    return next((n for n in range(1, num_nodes + 1) if world_size % n == 0 and world_size // n <= per_node), None)


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


_ANSWER_SECONDS = 20.0

# How srun would read the wishes of whoever started the job: a launch says for itself what it needs.
_WISHES = re.compile(
    r"SLURM_(GPUS\w*|GRES\w*|TRES_PER_TASK|NTASKS\w*|NPROCS|TASKS_PER_NODE|NNODES|NODELIST|CPUS_PER_(TASK|GPU)|"
    r"CPU_BIND\w*|DISTRIBUTION|EXPORT_ENV|HINT|EXCLUSIVE|OVERLAP|STEP\w*|THREADS_PER_CORE|CORE_SPEC|"
    r"WAIT|KILL_BAD_EXIT|LABELIO|UNBUFFEREDIO|STD\w+MODE|PROCID|LOCALID|GTIDS|NODEID|TASK_PID)|PMI\w*|PMIX\w*"
)


def step_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` without what an enclosing sbatch or srun left, which srun would take for our options."""
    return {name: value for name, value in variables.items() if not _WISHES.fullmatch(name)}


def end_time(job_id: str) -> float | None:
    """When the job reaches its time limit, which may change, in epoch seconds; ``None``: never, or nobody knows."""
    try:
        found = datetime.strptime(_field(_job(job_id), "EndTime"), "%Y-%m-%dT%H:%M:%S")  # noqa: DTZ007 - local time
    except ValueError:
        return None
    return found.timestamp()


def restarts(job_id: str) -> int | None:
    """How often the job was requeued; ``None``: nobody knows."""
    found = _field(_job(job_id), "Restarts")
    return int(found) if found.isdigit() else None


def address(node: str) -> str:
    """Where ``node`` answers: its name need not resolve."""
    return _field(_nodes([node]), "NodeAddr") or node


def node_states(nodes: Sequence[str]) -> dict[str, str]:
    """``idle``, ``down*``, … of each; without those of which nobody knows."""
    return {_field(line, "NodeName"): _field(line, "State").lower() for line in _nodes(nodes).splitlines()}


def has_gpus_to_give(node: str) -> bool:
    """Whether SLURM hands out this node's GPUs, so that a job has only those that it asked for."""
    return "gpu" in _field(_nodes([node]), "Gres")


def step_words(nodes: Sequence[str], name: str, *more: str, cpu_bind: str = "none") -> list[str]:
    """srun with one task on each of ``nodes``."""
    size = len(nodes)
    return [
        *("srun", f"--nodes={size}", f"--ntasks={size}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"),
        # Beside any step that runs already: each process of a parallel pytest asks, and leases keep launches apart.
        # SLURM would let none start on nodes of a step that lost another, for minutes: to it that step holds them.
        "--overlap",
        # A node that fails must not take the others' last words with it.
        *("--kill-on-bad-exit=0", f"--job-name={name}", f"--cpu-bind={cpu_bind}", *more),
    ]


def run_step(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run srun to its end; OSError or TimeoutExpired where it cannot be started, or does not end."""
    return _ran(command, timeout=seconds, env=step_environment(os.environ))


def cancel_step(job_id: str, step_name: str) -> None:
    """End the job's steps of this name, which outlive an srun that had to be killed."""
    for line in _run(["squeue", "--steps", "--noheader", "--format=%i %j", "--job", job_id]).splitlines():
        step, _, name = line.strip().partition(" ")
        if name == step_name:
            _run(["scancel", "--quiet", step])


def _job(job_id: str) -> str:
    """Its line; a task of an array may have the array's number, by which all of them are shown."""
    lines = _run(["scontrol", "show", "job", "-o", job_id]).splitlines()
    return next((line for line in lines if _field(line, "JobId") == job_id), "")


def _field(line: str, name: str) -> str:
    match = re.search(rf"(?:^|\s){name}=(\S+)", line)
    return match[1] if match else ""


def _nodes(nodes: Sequence[str]) -> str:
    return _run(["scontrol", "show", "node", "-o", ",".join(nodes)])


def _run(command: list[str]) -> str:
    try:
        done = _ran(command, timeout=_ANSWER_SECONDS, env={**os.environ, "SLURM_TIME_FORMAT": "standard"})
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
