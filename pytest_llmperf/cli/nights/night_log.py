"""The file of all nights, read: where each of them stands, as its lines and SLURM say."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# The queue: what SLURM says of a night's jobs.


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


#: Beside the folders of the nights.
FILE = "nights.txt"
#: How a line begins that says a night is over without results, and one that it waits for help.
LOST, STUCK = "not merged: ", "waits: "

_STAMP = "%Y-%m-%d %H:%M:%S"
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (.+?)  (.*)")
_MERGED = ("green: ", "red: ")
_JOBS = re.compile(r"submitted as ([0-9 ]+?), (?:to be merged by ([0-9]+)|with no job that merges)")
# Beyond this a night holds up the next.
_LATE_HOURS = 20.0


@dataclass
class LoggedNight:
    """One night, by its lines."""

    name: str
    begun: float
    """Of its first line; seconds since the epoch, as all times here."""
    at: float = 0.0
    """Of the line that counts."""
    said: str = ""
    """That line: how it was merged, else the last."""
    jobs: tuple[str, ...] = ()
    merged_by: str = ""
    is_merged: bool = False
    warned: set[str] = field(default_factory=set)
    """``LOST`` and ``STUCK``, where a line begins so."""

    @property
    def is_open(self) -> bool:
        """Whether more of it may be heard."""
        return bool(self.merged_by) and not self.is_merged and LOST not in self.warned

    def add(self, at: float, line: str) -> None:
        """Its next line."""
        if jobs := _JOBS.match(line):
            self.jobs, self.merged_by = tuple(jobs[1].split()), jobs[2] or ""
        self.warned |= {word for word in (LOST, STUCK) if line.startswith(word)}
        is_merged = line.startswith(_MERGED)
        if is_merged or not self.is_merged:
            self.at, self.said, self.is_merged = at, line, is_merged


@dataclass(frozen=True)
class Standing:
    """Where an open night stands."""

    night: LoggedNight
    words: str
    warning: str = ""
    """``LOST`` or ``STUCK``: somebody has to do something; empty: it takes its course."""


def read(file: Path) -> list[LoggedNight]:
    """The nights of ``file``, in the order in which they began.

    Raises:
        OSError: it cannot be read.
    """
    nights: dict[str, LoggedNight] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        try:
            at = time.mktime(time.strptime(match[1], _STAMP))
        except (ValueError, OverflowError):
            continue
        nights.setdefault(match[2], LoggedNight(match[2], at)).add(at, match[3])
    return [*nights.values()]


def standings(file: Path) -> list[Standing]:
    """Of the open nights of ``file``, by what SLURM says of their jobs.

    Raises:
        OSError: the file cannot be read.
    """
    ids = [job for night in read(file) if night.is_open for job in (*night.jobs, night.merged_by)]
    found = queued(ids) if ids else {}
    # Read again: the last job may have ended meanwhile.
    return [_standing(file.parent, night, found) for night in read(file) if night.is_open]


def _standing(folder: Path, night: LoggedNight, found: Mapping[str, QueuedJob] | None) -> Standing:
    if found is None:
        return Standing(night, f"{night.said}; SLURM does not answer here")
    merge = found.get(night.merged_by)
    if merge is None or not merge.is_open:
        how = merge.state if merge is not None else "gone"
        text = f"{LOST}job {night.merged_by}, which merges, is {how}; jobs: {_told(night.jobs, found)}; "
        return Standing(night, f"{text}see {folder / night.name}, or: llmperf merge {folder / night.name}", LOST)
    jobs, hours = _told(night.jobs, found), (time.time() - night.begun) / 3600
    waiting = {job: found[job] for job in night.jobs if job in found and found[job].state == "PENDING"}
    if merge.is_stuck:
        waiting[night.merged_by] = merge
    late = f" for {hours:.0f} h" if hours >= 1 else ""
    if any(job.is_stuck for job in waiting.values()) or (waiting and hours > _LATE_HOURS):
        return Standing(night, f"{STUCK}{_told([*waiting], found)}{late}; it may never start", STUCK)
    return Standing(night, f"not merged yet: {jobs}{late}")


def _told(jobs: Sequence[str], found: Mapping[str, QueuedJob]) -> str:
    return ", ".join(f"{job} {found.get(job, 'ended')}" for job in jobs)
