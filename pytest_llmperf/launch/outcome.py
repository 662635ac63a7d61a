"""What became of a launch, read from its run folder: the record, or the reason there is none.

Return codes and records decide; logs are only quoted. Whatever a rank printed, nothing here raises."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pytest_llmperf.launch.process import Ended, signal_name
from pytest_llmperf.launch.scratch import means_no_room, unwritable
from pytest_llmperf.launch.script import explained
from pytest_llmperf.records.failure import SOAKED, Failure, Progress, Room, said
from pytest_llmperf.records.launch import MEASURED_FILE, RECORD_FILE, Launch, environment_of
from pytest_llmperf.records.learning import ERRORS_FILE, Learning, TrainingErrors
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support import codec, grouped
from pytest_llmperf.support.files import text_of
from pytest_llmperf.support.redaction import without_secrets

T = TypeVar("T")

#: The end of a timeout's message.
LONGER = "; its limit was over, raise --perf-timeout"

#: What small trainings did.
Errors: TypeAlias = list[TrainingErrors]

_TAIL_LINES = 12
_TAIL_WIDTH = 160
# torchrun's own report of a rank that ended: its rank and exit code.
_RANK_REPORT = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)")
# What is wrong with a file that a rank wrote.
_UNUSABLE = (OSError, ValueError, TypeError, KeyError)


def read(folder: Path, spec: Spec, ended: Ended, progress: Progress) -> Launch | Failure:
    found = _from_file(folder, RECORD_FILE, Launch, ended, progress)
    if isinstance(found, Failure):
        # What was measured before a later step failed, or hung, on any rank: that costs what such steps show alone.
        measured = codec.load(Launch, folder / MEASURED_FILE)
        if measured is not None and measured.digest == spec.digest:
            why = f"a traced or inspected step failed ({found.message})"
            found = replace(measured, trace=Trace(none=why), learning=Learning(none=why))
    elif found.digest != spec.digest:
        found = _failure(folder, "error", f"launch.json is of digest {found.digest}, expected {spec.digest}", None)
    if isinstance(found, Failure):
        if spec.is_script:
            log = lines_of(folder / "torchrun.log")
            found = explained(replace(found, tail=found.tail or tidy(log)), ended, progress, log)
        return replace(found, environment=environment_of(folder) or found.environment)
    lines = (line for log in sorted(folder.glob("logs/**/stderr.log")) for line in lines_of(log))
    remarks = tuple(dict.fromkeys((*found.evidence.get("remarks", ()), *remarks_in(lines))))
    return replace(found, evidence={**found.evidence, "remarks": list(remarks)}) if remarks else found


def read_training_errors(folder: Path, ended: Ended, progress: Progress) -> Errors | Failure:
    """What the small trainings in ``folder`` did, or why nothing is known of them."""
    return _from_file(folder, ERRORS_FILE, list[TrainingErrors], ended, progress)


def broken_off(folder: Path, why: str, progress: Progress) -> Failure:
    """The failure of a launch that somebody else's clock ended, in the words of ours."""
    return _failure(folder, "timeout", f"{why}, {_where(progress)}", 0)


def refused(folder: Path, why: Exception) -> Failure:
    kind = "unwritable" if isinstance(why, OSError) and means_no_room(why) else "never-started"
    return Failure(kind=kind, message=str(why), tail=(), folder=str(folder))


def _from_file(folder: Path, name: str, kind: type[T], ended: Ended, progress: Progress) -> T | Failure:
    if ended.is_soaked:
        return Failure(kind=SOAKED, message="its minutes are over", tail=(), folder=str(folder))
    if ended.returncode != 0 or ended.timed_out:
        failure = _cause(folder, ended, progress)
        full = unwritable(folder) if failure.kind not in {"oom", "timeout"} else ""
        return replace(failure, kind="unwritable", message=f"{full}; {failure.message}") if full else failure
    try:
        return codec.read(kind, _json(folder / name))
    except _UNUSABLE as error:
        return _failure(folder, "error", f"the ranks ended well and left no usable {name} ({error})", None)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _cause(folder: Path, ended: Ended, progress: Progress) -> Failure:
    """As the ranks, torchrun or the kernel tell it."""
    where = _where(progress)
    if ended.timed_out:
        is_still = ended.stuck_seconds and progress.step
        what = f"no step for {ended.stuck_seconds:.0f} s" if is_still else f"no end after {ended.seconds:.0f} s"
        message, hang = f"{what}, {where}", hang_in(folder)
        if hang is None:
            return _failure(folder, "timeout", f"{message}{LONGER}", 0)
        failure = _failure(folder, "timeout", f"{message}: {hang.message}{LONGER}", hang.rank)
        return replace(failure, tail=tidy(hang.stack[:_TAIL_LINES]) or failure.tail)
    reasons = _reasons(folder)
    is_oom, known = any(reason.kind == "oom" for reason in reasons), {reason.rank for reason in reasons}
    ended_ranks = _dead(folder)
    for dead in (dead for dead in ended_ranks if not is_oom and dead.rank not in known):
        lack = want_of_memory(folder, dead.rank, dead.signal, _last_lines(folder, dead.rank), ended.oom_kills)
        if lack is not None:
            return _failure(folder, "oom", f"{dead}, {where}, for want of memory: {lack}", dead.rank)
    victim = next((dead for dead in ended_ranks if dead.signal), None)
    # A killed rank leaves no reason, and its peers leave one: that their connection to it broke.
    is_cause = victim is not None and not is_oom and victim.rank not in known
    if reasons and not is_cause:
        return reasons[0]
    if not reasons and victim is None and not (folder / "rank-0.pid").exists():
        return _failure(folder, "never-started", f"torchrun ended with {ended.returncode} before a rank began", None)
    if victim is not None:
        how = f"{victim}{'; the host may have run out of memory' if victim.signal == 'SIGKILL' else ''}"
    elif name := signal_name(ended.returncode):
        how = f"torchrun{ended.where} was ended by {name}"
    else:
        how = f"torchrun ended with {ended.returncode}, no rank told why"
    return _failure(folder, "killed", f"{how}, {where}", victim.rank if victim else None)


def _where(progress: Progress) -> str:
    of = f" of {progress.steps}" if progress.steps else ""
    return f"in phase {progress.phase}" + (f", step {progress.step}{of}" if progress.step or of else "")


@dataclass(frozen=True)
class _Dead:
    """A rank that torchrun saw go."""

    rank: int
    code: int
    signal: str
    """Empty where it ended by itself."""
    where: str

    def __str__(self) -> str:
        how = f"was ended by {self.signal}" if self.signal else f"ended with {self.code}"
        return f"rank {self.rank}{self.where} {how}"


def _dead(folder: Path) -> list[_Dead]:
    """Ranks that did not end well, and where, by torchrun's reports: of each, what it saw first comes first. SIGTERM is
    torchrun's own way to end the peers of a failed rank; only what it saw first can be somebody else's."""
    found = []
    # Of several nodes each has a log, named after it.
    for log in sorted(folder.glob("torchrun-*.log")) or [folder / "torchrun.log"]:
        node = log.stem.removeprefix("torchrun").removeprefix("-")
        where = f" on node {node}" if node else ""
        peers, _, cause = "\n".join(lines_of(log)).partition("Root Cause (first observed failure)")
        for reports, own in ((cause, ""), (peers, "SIGTERM")):
            codes = [(int(rank), int(code)) for rank, code in _RANK_REPORT.findall(reports)]
            dead = [_Dead(rank, code, signal_name(code) or "" if code < 0 else "", where) for rank, code in codes]
            found += [one for one in dead if not own or one.signal != own]
    return found


def _reasons(folder: Path) -> list[Failure]:
    """What ranks left that ended by an error: want of memory first, then the earliest; peers only saw a rank go."""
    found = []
    for path in folder.glob("failure-*.json"):
        with suppress(*_UNUSABLE):
            values, rank = _json(path), int(path.stem.partition("-")[2])
            kind, tail = str(values["kind"]), tidy(str(line) for line in values["tail"])
            failure = Failure(kind=kind, message=str(values["message"]), tail=tail, folder=str(folder), rank=rank)
            found.append((kind != "oom", float(values["time"]), failure))
    return [failure for *_, failure in sorted(found, key=lambda one: one[:2])]


def _failure(folder: Path, kind: str, message: str, rank: int | None) -> Failure:
    lines = (_last_lines(folder, rank) if rank is not None else ()) or lines_of(folder / "torchrun.log")
    return Failure(kind=kind, message=message, tail=tidy(lines), folder=str(folder), rank=rank)


def _last_lines(folder: Path, rank: int) -> Sequence[str]:
    """What ``rank`` left in its own log."""
    return [line for log in sorted(folder.glob(f"logs/**/{rank}/stderr.log")) for line in lines_of(log)]


def lines_of(path: Path) -> Sequence[str]:
    """The lines of a log; none where there is none."""
    return text_of(path).splitlines()


def tidy(lines: Iterable[str]) -> tuple[str, ...]:
    """The last of ``lines`` as they may be quoted."""
    safe = (without_secrets(ANSI.sub("", line)) for line in lines)  # what is cut is no longer known for a secret
    clean = ("".join(c for c in line if c.isprintable() or c == "\t")[:_TAIL_WIDTH] for line in safe)
    # Python underlines parts of a traceback's lines: markers without words.
    return tuple(line for line in clean if line.strip(" ^~\t"))[-_TAIL_LINES:]


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
# How a process ends itself, or trips over memory that it was not given. No other signal is of a limit.
_ITS_OWN = frozenset({"SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGTRAP", ""})
_LAST_WORDS = 20
# Words of a line that tells of something slower than it could be.
_WORDS = re.compile(
    r"\bfall(s|ing|en)?[ -]?back|\bfell back|\bfallback|\bnot installed|\bslow(er|ly)?\b|\bnaive\b|\bunoptimi[sz]ed"
    r"|\bnot (be )?(available|supported|compiled)|\bcould not (import|load|find)|\bfailed to (import|load)"
    r"|\bfast path\b|\bwill be disabled\b",
    re.IGNORECASE,
)
# torchrun's rank, glog's time and place, logging's level, a warning's file and line: another in each launch.
_HEAD = re.compile(
    r"^(\[rank\d+\]:?)?\s*(\[?[WIE]\d{4} [\d:. ]+\S*\s+\S+?\]\s*)?(\[?\d{4}-\d\d-\d\d[ T][\d:,.]+\]?\s*)?"
    r"(\S+:\d+: \w*Warning: |(WARNING|INFO|ERROR)\S*\s+)?"
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MOST_LINES, _MOST, _WIDTH = 20_000, 5, 240
# Where ranks agree on their last step, and a host waits for its device before.
_OUR_WAITS = ("pytest_llmperf/observe/training.py", {"now", "_agreed"})


@dataclass(frozen=True)
class Hang:
    message: str
    """``rank 1 in train (loop.py:7); ranks 0, 2, 3 in …``: first those that did not answer, then the odd ones."""
    rank: int
    """One of the first."""
    stack: tuple[str, ...]
    """Of the first that answered, its main thread's, innermost frame first."""


def hang_in(folder: Path) -> Hang | None:
    """Where the ranks of the launch in ``folder`` hung; ``None`` where none wrote anything."""
    stacks: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("stacks-rank-*.txt"):
        with suppress(OSError, ValueError):
            text = path.read_text(encoding="utf-8", errors="replace")
            # The main thread is the one that faulthandler writes last, unless it left threads out.
            frames = [match.groupdict() for match in _FRAME.finditer(_THREAD.split(text)[-1])]
            if frames and not text.rstrip().endswith("\n..."):
                stacks[int(path.stem.rpartition("-")[2])] = frames
    silent: dict[int, str] = {}
    for path in folder.glob("silent-rank-*.json"):
        with suppress(*_UNUSABLE):
            words, rank = _json(path), int(path.stem.rpartition("-")[2])
            where = f"on node {words['node']} " if words["node"] else ""
            if rank not in stacks:
                silent[rank] = f"{where}did not answer ({words['status']})"
    at = {rank: next(filter(_is_our_wait, frames), frames[0]) for rank, frames in stacks.items()}
    places = grouped(
        (f"in {f['function']} ({Path(f['file']).name}:{f['line']})", rank) for rank, f in sorted(at.items())
    )

    def odd_first(place: str) -> tuple[int, bool, int]:
        """Most ranks only wait for those that do not come, and they wait inside of torch, or for their last step."""
        ranks = places[place]
        frame = at[ranks[0]]
        return len(ranks), f"{os.sep}torch{os.sep}" in frame["file"] or _is_our_wait(frame), ranks[0]

    unheard = grouped((words, rank) for rank, words in sorted(silent.items()))
    if not (found := unheard | {place: places[place] for place in sorted(places, key=odd_first)}):
        return None
    lines = [f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)} {what}" for what, ranks in found.items()]
    more = [f"{len(lines) - 3} other places"] if len(lines) > 3 else []  # noqa: PLR2004 - what fits a line
    frames = next((stacks[ranks[0]] for ranks in found.values() if ranks[0] in stacks), [])
    stack = tuple(f"{frame['file']}:{frame['line']} in {frame['function']}" for frame in frames)
    return Hang("; ".join([*lines[:3], *more]), next(iter(found.values()))[0], stack)


def _is_our_wait(frame: Mapping[str, Any]) -> bool:
    file, functions = _OUR_WAITS
    return frame["file"].endswith(file) and frame["function"] in functions


def _listed(ranks: list[int]) -> str:
    """``0 to 3, 7``."""
    spans = ([rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda each: each[1] - each[0]))
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)


def want_of_memory(folder: Path, rank: int, signal: str, words: Sequence[str], oom_kills: int) -> str | None:
    """How it is known that ``rank`` had no memory left when ``signal`` (empty: its own exit) ended it, or ``None``.
    ``words`` are its last lines, and ``oom_kills`` the processes that the kernel has ended for it meanwhile."""
    room = codec.load(Room, folder / f"room-{rank}.json")
    if signal == "SIGKILL":
        # A rank on a GPU leaves no file: the host's memory is none of its card's.
        return f"the kernel ended {oom_kills} for want of memory" if oom_kills and room else None
    if signal not in _ITS_OWN:
        return None
    last = [line for line in words if line.strip()][-_LAST_WORDS:]
    if (plain := next((line.strip() for line in last if said(line) == "plainly"), None)) is not None:
        return plain
    # A library that does not look whether it got the memory it asked for trips over it.
    hinted = bool(signal) or any(said(line) == "perhaps" for line in last)
    return str(room) if room is not None and (room.is_full or (hinted and room.is_tight)) else None


def remarks_in(lines: Iterable[str]) -> tuple[str, ...]:
    """The first few of ``lines`` that tell of something slow, each once, without what differs between launches."""
    found: dict[str, None] = {}
    for line in (ANSI.sub("", line[: 10 * _WIDTH]) for line in islice(lines, _MOST_LINES)):
        if _WORDS.search(line):
            plain = "".join(c if c.isprintable() else " " for c in line).strip()
            plain = without_secrets(_HEAD.sub("", plain))
            found[plain if len(plain) <= _WIDTH else f"{plain[: _WIDTH - 3]}..."] = None
    return tuple(islice(filter(None, found), _MOST))
