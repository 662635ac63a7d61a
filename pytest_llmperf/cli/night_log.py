"""The file with a line for each event of a night: written, mailed and read, beside what SLURM says of the jobs.

``llmperf nights`` shows it, ``llmperf merge`` adds how a night went."""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pytest_llmperf.cli.answer import Answer, ClusterError, CommandError, Screen, add_option
from pytest_llmperf.cli.night_results import gather
from pytest_llmperf.cli.night_tests import left_out
from pytest_llmperf.report.results_json import write_json
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import user_input
from pytest_llmperf.support.files import write_text

#: Beside the folders of the nights.
NIGHTS_FILE = "nights.txt"
#: How a line begins where a night ended without results, and where it waits for help.
LOST, STUCK = "not merged: ", "waits: "

_STAMP = "%Y-%m-%d %H:%M:%S"
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (.+?)  (.*)")
_MERGED = ("green: ", "red: ")
_JOBS = re.compile(r"submitted as ([0-9 ]+?), (?:to be merged by ([0-9]+)|with no job that merges)")
# Of a line, or of a job's comment: what is longer is in summary.md.
_LONGEST = 400
# A night that takes longer holds up the next.
_LATE_HOURS = 20.0
# A mail program hands over and ends; one that waits for a missing server would use up the job's time.
_MAIL_SECONDS = 120
_QUEUE_SECONDS = 60
# SLURM looks at a new job within a few seconds, and has no reason before.
_FIRST_LOOK_SECONDS = 5.0

_OPEN = frozenset(
    "PENDING RUNNING SUSPENDED COMPLETING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESIZING SIGNALING "
    "SPECIAL_EXIT STAGE_OUT STOPPED RESV_DEL_HOLD".split()
)
# What SLURM calls a wait that ends only with somebody's help, spaces left out. A limit on how many jobs may run at
# once is not among them: it ends when others do.
_STUCK = re.compile(
    r"Partition(Down|Inactive|TimeLimit|NodeLimit|Config)|ReqNodeNotAvail,UnavailableNodes|BadConstraint|NodeDown|JobHeld"
    r"|Invalid|DependencyNeverSatisfied|JobLaunchFailure|launchfailed|jobrequeuedinheldstate|ReservationDeleted|DeadLine"
    r"|(Assoc|QOS|Max|Account)\w*(PerJob|Wall|Minutes|MemPer|NotAllowed|Min(GRES|CPU|Node|Memory))|QOSMin|AccountNotAllowed"
)


def answer_of(
    command: Sequence[str], seconds: float | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``command`` at its end, as ``subprocess.run``; not by pipes: what it started may hold them open longer."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        done = subprocess.run(
            command, check=False, cwd=folder, timeout=seconds, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode("utf-8", "replace"))
    return subprocess.CompletedProcess(command, done.returncode, *said)


@dataclass(frozen=True)
class QueuedJob:
    """A job, or an array by its first task that has not ended."""

    state: str
    reason: str

    @property
    def is_open(self) -> bool:
        return self.state in _OPEN

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for what does not come by itself."""
        return self.state == "PENDING" and _STUCK.match(self.reason.replace(" ", "")) is not None

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.state == "PENDING" and self.reason else self.state


def queued(jobs: Sequence[str]) -> Mapping[str, QueuedJob] | None:
    """Those of ``jobs`` that SLURM knows; ``None``: it does not answer, or is not installed here."""
    command = ["squeue", "--noheader", "--states=all", "--format=%F|%T|%r", f"--jobs={','.join(jobs)}"]
    try:
        done = answer_of(command, _QUEUE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return {} if "Invalid job id" in done.stderr else None
    found: dict[str, QueuedJob] = {}
    for line in done.stdout.splitlines():
        number, state, reason = [*line.strip().split("|", 2), "", ""][:3]
        if number in jobs and not (number in found and found[number].is_open):
            found[number] = QueuedJob(state, reason)
    return found


def first_look(jobs: Sequence[str]) -> Mapping[str, QueuedJob]:
    """Just submitted ``jobs``, once SLURM says why they wait, or a few seconds later; empty where nothing is known."""
    deadline = time.monotonic() + _FIRST_LOOK_SECONDS
    while True:
        found = queued(jobs) or {}
        is_explained = not any(job.state == "PENDING" and job.reason in ("", "None") for job in found.values())
        if is_explained or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


@dataclass(frozen=True)
class Notice:
    """Where one night, by the name of its folder of results, is reported; an empty field is left out."""

    night: str
    name: str = ""
    mail: str = ""
    nights: Path | None = None

    def tell(self, headline: str, page: Sequence[str], unwritten: Sequence[str], troubles: Sequence[str]) -> list[str]:
        """Report a merged night; a line for each report that failed. What was not written comes first."""
        colour = "RED" if unwritten or troubles else "green"
        unmailed = self.send(colour, [*page, *map(one_line, unwritten)])
        failed = [*unmailed, *self.note("; ".join([headline, *unwritten, *unmailed, *troubles]))]
        if self.nights is not None and (job := os.environ.get("SLURM_JOB_ID")):
            comment = _cut("; ".join([headline, *unwritten, *failed, *troubles]))
            with suppress(OSError, subprocess.TimeoutExpired):  # a site may forbid it: the job's state says enough
                answer_of(["scontrol", "update", f"JobId={job}", f"Comment=llmperf: {comment}"], _MAIL_SECONDS)
        return failed

    def note(self, line: str) -> list[str]:
        """Add a line to the file of all nights; why it could not be added."""
        if self.nights is None:
            return []
        try:
            with self.nights.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.strftime(_STAMP)}  {self.night}  {_cut(line)}\n")
        except OSError as error:
            return [f"{self.nights}: not written ({error.strerror or error})"]
        return []

    def alarm(self, line: str, *, mailed: bool = True) -> list[str]:
        """Note, and mail, what became of a night without results; a line for each report that failed."""
        unmailed = self.send("RED", [one_line(f"{self.night}: {line}")]) if mailed else []
        return [*unmailed, *self.note("; ".join([line, *unmailed]))]

    def send(self, colour: str, page: Sequence[str]) -> list[str]:
        if not self.mail:
            return []
        text = "\n".join([*page, ""]).encode("utf-8", "backslashreplace")
        try:
            command = ["mail", "-s", f"{self.name}: {colour}", self.mail]
            subprocess.run(command, input=text, check=True, timeout=_MAIL_SECONDS)
        except OSError as error:
            why = f"mail: {error.strerror or error}"
        except subprocess.TimeoutExpired:
            why = f"mail did not end within {_MAIL_SECONDS} s"
        except subprocess.CalledProcessError as error:
            why = f"mail ended with exit code {error.returncode}"
        else:
            return []
        return [f"{self.mail}: not mailed ({why})"]


def _cut(line: str) -> str:
    line = one_line(line)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def warning_in(line: str) -> set[str]:
    return {word for word in (LOST, STUCK) if line.startswith(word)}


@dataclass
class LoggedNight:
    name: str
    begun: float
    """Time of its first line; seconds since the epoch, as all times here."""
    at: float = 0.0
    said: str = ""
    """The line that counts, of that time: how it was merged, else the last."""
    jobs: tuple[str, ...] = ()
    merged_by: str = ""
    is_merged: bool = False
    warned: set[str] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        return bool(self.merged_by) and not self.is_merged and LOST not in self.warned

    def add(self, at: float, line: str) -> None:
        if jobs := _JOBS.match(line):
            self.jobs, self.merged_by = tuple(jobs[1].split()), jobs[2] or ""
        self.warned |= warning_in(line)
        is_merged = line.startswith(_MERGED)
        if is_merged or not self.is_merged:
            self.at, self.said, self.is_merged = at, line, is_merged


def read(file: Path) -> list[LoggedNight]:
    """The nights of ``file``, in the order in which they began."""
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


def standings(file: Path) -> list[tuple[LoggedNight, str]]:
    """The open nights of ``file``, and where SLURM says each stands; ``LOST`` and ``STUCK`` begin what needs help."""
    ids = [job for night in read(file) if night.is_open for job in (*night.jobs, night.merged_by)]
    found = queued(ids) if ids else {}
    # Read again: the last job may have ended meanwhile.
    return [(night, _standing(file.parent, night, found)) for night in read(file) if night.is_open]


def _standing(folder: Path, night: LoggedNight, found: Mapping[str, QueuedJob] | None) -> str:
    if found is None:
        return f"{night.said}; SLURM does not answer here"
    states = {job: f"{job} {found.get(job, 'ended')}" for job in (*night.jobs, night.merged_by)}
    jobs, hours = ", ".join(states[job] for job in night.jobs), (time.time() - night.begun) / 3600
    merge = found.get(night.merged_by)
    if merge is None or not merge.is_open:
        how = merge.state if merge is not None else "gone"
        text = f"{LOST}job {night.merged_by}, which merges, is {how}; jobs: {jobs}; "
        return f"{text}see {folder / night.name}, or: llmperf merge {folder / night.name}"
    waiting = {job: found[job] for job in night.jobs if job in found and found[job].state == "PENDING"}
    if merge.is_stuck:
        waiting[night.merged_by] = merge
    late = f" for {hours:.0f} h" if hours >= 1 else ""
    if any(job.is_stuck for job in waiting.values()) or (waiting and hours > _LATE_HOURS):
        waits = ", ".join(states[job] for job in waiting)
        return f"{STUCK}{waits}{late}; it may never start"
    return f"not merged yet: {jobs}{late}"


# ``llmperf submit --wait``: a night followed in the queue until it is merged.
_WAITING_SECONDS = 10.0
# Jobs that are gone may be those of a controller that has just begun, or their last line is not seen here yet.
_LOOKS = 3


def waited(notice: Notice, jobs: Sequence[str], merged_by: str) -> Iterator[str]:
    """A line whenever it stands otherwise, then how the night went; ClusterError: not green, or never merged."""
    night = LoggedNight(notice.night, time.time(), said="submitted", jobs=tuple(jobs), merged_by=merged_by)
    shown, num_lost = "", 0
    while (said := _merged(notice)) is None:
        words = _standing(notice.nights.parent if notice.nights else Path(), night, queued([*jobs, merged_by]))
        num_lost = num_lost + 1 if words.startswith(LOST) else 0
        if num_lost == _LOOKS:
            raise ClusterError("; ".join([f"{notice.night}: {words}", *notice.alarm(words)]))
        if words != shown and not num_lost:
            yield f"{time.strftime('%H:%M:%S')} {words}"
            shown = words
        time.sleep(_WAITING_SECONDS)
    if said.startswith("red") or "; " in said:
        raise ClusterError(f"{notice.night}: {said}")
    yield said


def _merged(notice: Notice) -> str | None:
    nights = read(notice.nights) if notice.nights is not None else []
    return next((night.said for night in nights if night.name == notice.night and night.is_merged), None)


_MOST_SHOWN = 20


def add_nights_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "of the nights, with nights.txt; default: %(default)s"
    add("folder", metavar="FOLDER", type=Path, nargs="?", default=Path(".llmperf/nightly"), help=text)
    text = "exit code 1 unless a night was merged within this time, green or red; for cron and monitoring, e.g. 26h"
    time_above_0 = user_input.argument(user_input.duration_hours, "a time above 0, e.g. 24h, 2d, 1d12h or 90m")
    add("--newer-than", metavar="TIME", type=time_above_0, help=text)
    add_option(parser, "--mail", help="with --newer-than: mail it there, by the program mail")
    parser.set_defaults(answer=_nights)


def _nights(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    if arguments.mail and arguments.newer_than is None:
        arguments.usage("--mail tells of a night that is missing; expected --newer-than beside it")
    folder, hours = arguments.folder, arguments.newer_than
    file = folder / NIGHTS_FILE
    lines, troubles = list[str](), list[str]()
    try:
        open_nights = {night.name: words for night, words in standings(file)}
        nights = read(file)
    except OSError as error:
        why = f"{file}: not read ({error.strerror or error}); name the folder that [suite] results says"
        if hours is None:
            raise CommandError(why) from None
        troubles.append(why)
    else:
        for night in nights[-_MOST_SHOWN:]:
            began = time.strftime("%Y-%m-%d %H:%M", time.localtime(night.begun))
            lines.append(f"{began}  {night.name}  {one_line(open_nights.get(night.name, night.said))}")
        merged = max((night.at for night in nights if night.is_merged), default=None)
        age = math.inf if merged is None else (time.time() - merged) / 3600
        if hours is not None and age > hours:
            last = "none was ever" if merged is None else f"the last was {age:.0f} h ago"
            troubles.append(f"no night was merged within {hours:g} h; {last}")
    if troubles and arguments.mail:
        notice = Notice(folder.name, name="llmperf nights", mail=arguments.mail)
        troubles += notice.send("RED", [*troubles, "", *lines])
    return Answer(lines, troubles)


def add_merge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("results", metavar="DIR|FILE", type=Path, nargs="+", help="gpus-*.json of a folder, or files")
    add("--expect", metavar="NAME", action="append", default=[], help="a file that must be in the folder")
    text = "tests of so many GPUs are not missed; wider: of more than the night has"
    add("--without", metavar="N|wider", action="append", default=[], help=text)
    add("--json", metavar="FILE", type=Path)
    add("--markdown", metavar="FILE", type=Path)
    text = "add a line to this file; inside of a SLURM job, make it the job's comment too"
    add("--nights", metavar="FILE", type=Path, help=text)
    add_option(parser, "--mail", help="send the summary there, by the program mail")
    add("--name", default="llmperf-nightly", help="of the night, for the mail's subject; default: %(default)s")
    parser.set_defaults(answer=_merge)


def _merge(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    without = left_out(arguments.without)
    if without is None:
        arguments.usage(f"--without {' '.join(arguments.without)}: expected numbers of GPUs, or the word wider")
    night = gather(arguments.results, arguments.expect, without)
    page, unwritten = night.page(), list[str]()
    writers: list[tuple[Path | None, Callable[[Path], None]]] = [
        (arguments.json, lambda path: write_json(path, night.document())),
        (arguments.markdown, lambda path: write_text(path, "\n".join([*page, ""]))),
    ]
    for path, write in writers:
        try:
            if path is not None:
                write(path)
        except OSError as error:
            unwritten.append(f"{path}: not written ({error.strerror or error})")
    notice = Notice(arguments.results[0].name, name=arguments.name, mail=arguments.mail, nights=arguments.nights)
    # A failed report fails the command: somebody waits for word of a green night, too.
    unreported = notice.tell(night.headline, page, unwritten, night.troubles)
    return Answer(page, [*night.troubles, *unwritten, *unreported], acts=True)
