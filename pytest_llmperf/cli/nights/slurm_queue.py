"""The queue: what SLURM says of a night's jobs."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SECONDS = 60
# SLURM looks at a new job within a few seconds, and has no reason before.
_FIRST_LOOK_SECONDS = 5.0

_OPEN = frozenset(
    "PENDING RUNNING SUSPENDED COMPLETING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESIZING SIGNALING "
    "SPECIAL_EXIT STAGE_OUT STOPPED RESV_DEL_HOLD".split()
)
# What SLURM calls a wait that ends with somebody's help alone, spaces left out. A limit on how many jobs may run at
# once is none: it ends when others do.
_STUCK = re.compile(
    r"Partition(Down|Inactive|TimeLimit|NodeLimit|Config)|ReqNodeNotAvail,UnavailableNodes|BadConstraint|NodeDown|JobHeld"
    r"|Invalid|DependencyNeverSatisfied|JobLaunchFailure|launchfailed|jobrequeuedinheldstate|ReservationDeleted|DeadLine"
    r"|(Assoc|QOS|Max|Account)\w*(PerJob|Wall|Minutes|MemPer|NotAllowed|Min(GRES|CPU|Node|Memory))|QOSMin|AccountNotAllowed"
)


@dataclass(frozen=True)
class QueuedJob:
    """A job, or an array by the first of its tasks that has not ended."""

    state: str
    reason: str

    @property
    def is_open(self) -> bool:
        """Whether it may still do something."""
        return self.state in _OPEN

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for what does not come by itself."""
        return self.state == "PENDING" and _STUCK.match(self.reason.replace(" ", "")) is not None

    @property
    def is_unexplained(self) -> bool:
        """Whether SLURM has not looked at it yet."""
        return self.state == "PENDING" and self.reason in ("", "None")

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.state == "PENDING" and self.reason else self.state


def queued(jobs: Sequence[str]) -> Mapping[str, QueuedJob] | None:
    """Those of ``jobs`` that SLURM knows; ``None``: it does not answer, or there is none here."""
    command = ["squeue", "--noheader", "--states=all", "--format=%F|%T|%r", f"--jobs={','.join(jobs)}"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return {} if "Invalid job id" in done.stderr else None
    found: dict[str, QueuedJob] = {}
    for line in done.stdout.splitlines():
        number, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        job = QueuedJob(state, reason)
        if number in jobs and not (number in found and found[number].is_open):
            found[number] = job
    return found


def first_look(jobs: Sequence[str]) -> Mapping[str, QueuedJob]:
    """Just submitted ``jobs``, once SLURM says why they wait, or a few seconds later; empty where nothing is known."""
    deadline = time.monotonic() + _FIRST_LOOK_SECONDS
    while True:
        found = queued(jobs) or {}
        if not any(job.is_unexplained for job in found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(0.5)
