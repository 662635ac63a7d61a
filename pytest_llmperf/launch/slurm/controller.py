"""What the SLURM controller is asked: when the job ends, where a node is. It may not answer; then nobody knows."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

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
    """When the job reaches its time limit, in seconds since the epoch; ``None``: never, or nobody knows.

    It is asked anew each time: a limit may be changed while the job runs.
    """
    return _time(job_id, "EndTime")


def start_time(job_id: str) -> float:
    """When the job began, after its last requeue; now, where nobody knows."""
    return _time(job_id, "StartTime") or time.time()


def _time(job_id: str, name: str) -> float | None:
    try:
        found = datetime.strptime(_field(_job(job_id), name), "%Y-%m-%dT%H:%M:%S")  # noqa: DTZ007 - local time
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


def step_words(nodes: Sequence[str], name: str) -> list[str]:
    """srun with one task on each of ``nodes``, beside any step that runs already; it asks for no GPU."""
    size = len(nodes)
    return [
        *("srun", f"--nodes={size}", f"--ntasks={size}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"),
        *("--overlap", "--input=none", f"--job-name={name}", "--cpu-bind=none", "--kill-on-bad-exit=0"),
    ]


def run_step(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run srun to its end; OSError or TimeoutExpired where it cannot be started, or does not end."""
    return subprocess.run(
        command,
        env=step_environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=seconds,
    )


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
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_ANSWER_SECONDS,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
