"""The file of all nights, read: where each of them stands, as its lines and SLURM say."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_llmperf.cli.nights.slurm_queue import QueuedJob, queued

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
