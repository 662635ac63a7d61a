"""What became of a launch, read from its run folder: the record, or the reason there is none.

Return codes and records decide; logs are only quoted. Whatever a rank printed, nothing here raises.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_llmperf.launch import last_words
from pytest_llmperf.launch.last_words import ANSI, remarks_in, want_of_memory
from pytest_llmperf.launch.process import Ended, signal_name
from pytest_llmperf.launch.scratch import unwritable
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import ENVIRONMENT_FILE, MEASURED_FILE, RECORD_FILE, Environment, Launch
from pytest_llmperf.records.learning import Learning
from pytest_llmperf.records.parity import FILE as ERRORS_FILE
from pytest_llmperf.records.parity import TrainingErrors
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from pytest_llmperf.support.redaction import without_secrets

_TAIL_LINES = 12
_TAIL_WIDTH = 160


def read(folder: Path, spec: TrainSpec, ended: Ended, progress: Progress) -> Launch | Failure:
    """The launch in ``folder``, or why there is none."""
    found = _read(folder, spec, ended, progress)
    if isinstance(found, Failure):
        try:
            told = json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
            return replace(found, environment=codec.read(Environment, told))
        except (OSError, ValueError):
            return found
    lines = (line for log in sorted(folder.glob("logs/**/stderr.log")) for line in lines_of(log))
    remarks = tuple(dict.fromkeys((*found.evidence.get("remarks", ()), *remarks_in(lines))))
    return replace(found, evidence={**found.evidence, "remarks": list(remarks)}) if remarks else found


def _read(folder: Path, spec: TrainSpec, ended: Ended, progress: Progress) -> Launch | Failure:
    # A rank that was ended while it saved has left gigabytes that nobody asked to keep.
    for left in folder.glob("*/checkpoint-*"):
        shutil.rmtree(left, ignore_errors=True)
    if ended.returncode == 0 and not ended.timed_out:
        try:
            launch = _record(folder / RECORD_FILE)
        except (OSError, ValueError) as error:
            message = f"the ranks ended well and left no usable {RECORD_FILE} ({error})"
            return _measured(folder, spec, _failure(folder, "error", message, None))
        if launch.digest != spec.digest:
            return _failure(folder, "error", f"launch.json is of digest {launch.digest}, expected {spec.digest}", None)
        return launch
    return _measured(folder, spec, _why(folder, ended, progress))


def _record(path: Path) -> Launch:
    return codec.read(Launch, json.loads(path.read_text(encoding="utf-8")))


def _measured(folder: Path, spec: TrainSpec, failure: Failure) -> Launch | Failure:
    """What was measured before a later step failed, or hung, on any rank: that costs what such steps show alone."""
    try:
        launch = _record(folder / MEASURED_FILE)
    except (OSError, ValueError):
        return failure
    if launch.digest != spec.digest:
        return failure
    why = f"a traced or inspected step failed ({failure.message})"
    return replace(launch, trace=Trace(none=why), learning=Learning(none=why))


#: The end of a timeout's message.
LONGER = "; a longer limit is --perf-timeout"

#: A micro-batch size, and its peak allocated bytes where it trained.
Tried = tuple[int, int | None]


def read_sizes(folder: Path, ended: Ended, progress: Progress) -> list[Tried] | Failure:
    """The sizes that were tried in ``folder``, in order, or why nothing of it is known."""
    if ended.returncode != 0 or ended.timed_out:
        return _why(folder, ended, progress)
    try:
        return _tried(folder)
    except (OSError, ValueError, TypeError) as error:
        return _failure(folder, "error", f"the rank ended well and left no usable sizes.json ({error})", None)


def sizes_so_far(folder: Path) -> list[Tried]:
    """The sizes that were tried in ``folder`` until now, in order; none where nothing is known."""
    try:
        return _tried(folder)
    except (OSError, ValueError, TypeError):
        return []


def read_training_errors(folder: Path, ended: Ended, progress: Progress) -> list[TrainingErrors] | Failure:
    """What the small trainings in ``folder`` did, or why nothing is known of them."""
    if ended.returncode != 0 or ended.timed_out:
        return _why(folder, ended, progress)
    try:
        told = json.loads((folder / ERRORS_FILE).read_text(encoding="utf-8"))
        return [codec.read(TrainingErrors, one) for one in told]
    except (OSError, ValueError, TypeError, KeyError) as error:
        return _failure(folder, "error", f"the ranks ended well and left no usable {ERRORS_FILE} ({error})", None)


def _tried(folder: Path) -> list[Tried]:
    tried = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
    return [(int(size), None if peak is None else int(peak)) for size, peak in tried]


@dataclass(frozen=True)
class _Reason:
    rank: int
    kind: str
    message: str
    tail: tuple[str, ...]
    time: float


def _why(folder: Path, ended: Ended, progress: Progress) -> Failure:
    failure = _told(folder, ended, progress)
    full = unwritable(folder) if failure.kind not in {"oom", "timeout"} else ""
    if full:
        return replace(failure, kind="unwritable", message=f"{full}; {failure.message}")
    return failure


def _told(folder: Path, ended: Ended, progress: Progress) -> Failure:
    reasons = sorted(_reasons(folder), key=lambda reason: (reason.kind != "oom", reason.time))
    where = _where(progress)
    if ended.timed_out:
        return _timed_out(folder, f"no end after {ended.seconds:.0f} s, {where}")
    told = {reason.rank for reason in reasons}
    if not any(reason.kind == "oom" for reason in reasons):
        for dead in (dead for dead in _dead(folder) if dead.rank not in told):
            lack = want_of_memory(folder, dead.rank, dead.signal, _last_lines(folder, dead.rank), ended.oom_kills)
            if lack is not None:
                return _failure(folder, "oom", f"{dead}, {where}, for want of memory: {lack}", dead.rank)
    victim = next((dead.rank for dead in _dead(folder) if dead.signal), None)
    if victim is not None and not any(reason.kind == "oom" or reason.rank == victim for reason in reasons):
        # A killed rank leaves no reason, and its peers leave one: that their connection to it broke.
        return _failure(folder, "killed", f"{_killed(folder, ended)}, {where}", victim)
    if reasons:
        # The earliest is the cause: the peers of a rank that failed only saw it go. Out of memory wins, since it may
        # surface in one rank while another already waits for it.
        first = reasons[0]
        return Failure(kind=first.kind, message=first.message, tail=first.tail, folder=str(folder), rank=first.rank)
    if not (folder / "rank-0.pid").exists():
        return _failure(folder, "never-started", f"torchrun ended with {ended.returncode} before a rank began", None)
    return _failure(folder, "killed", f"{_killed(folder, ended)}, {where}", victim)


def broken_off(folder: Path, why: str, progress: Progress) -> Failure:
    """Of a launch that somebody else's clock ended, in the words of ours."""
    return _failure(folder, "timeout", f"{why}, {_where(progress)}", 0)


def _where(progress: Progress) -> str:
    return f"in phase {progress.phase}" + (f", step {progress.step} of {progress.steps}" if progress.steps else "")


def _timed_out(folder: Path, message: str) -> Failure:
    hang = last_words.read(folder)
    if hang is None:
        return _failure(folder, "timeout", f"{message}{LONGER}", 0)
    return Failure(
        kind="timeout",
        message=f"{message}: {hang.message}{LONGER}",
        tail=tidy(hang.stack[:_TAIL_LINES]) or _failure(folder, "timeout", message, hang.rank).tail,
        folder=str(folder),
        rank=hang.rank,
    )


# torchrun's own report of a rank that ended: its rank and exit code.
_RANK_REPORT = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)")


def _killed(folder: Path, ended: Ended) -> str:
    for dead in (dead for dead in _dead(folder) if dead.signal):
        return f"{dead}{'; the host may have run out of memory' if dead.signal == 'SIGKILL' else ''}"
    if signal_name(ended.returncode):
        return f"torchrun{ended.where} was ended by {signal_name(ended.returncode)}"
    return f"torchrun ended with {ended.returncode}, no rank told why"


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
    """Ranks that did not end well, and where, by torchrun's reports: of each, what it saw first comes first.

    SIGTERM is torchrun's own way to end the peers of a failed rank; only what it saw first can be somebody else's.
    """
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


def _reasons(folder: Path) -> list[_Reason]:
    found = []
    for path in folder.glob("failure-*.json"):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            rank = int(path.stem.partition("-")[2])
            tail = tidy(str(line) for line in values["tail"])
            found.append(_Reason(rank, str(values["kind"]), str(values["message"]), tail, float(values["time"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _failure(folder: Path, kind: str, message: str, rank: int | None) -> Failure:
    lines = (_last_lines(folder, rank) if rank is not None else ()) or lines_of(folder / "torchrun.log")
    return Failure(kind=kind, message=message, tail=tidy(lines), folder=str(folder), rank=rank)


def _last_lines(folder: Path, rank: int) -> Sequence[str]:
    """What ``rank`` left in its own log."""
    return [line for log in sorted(folder.glob(f"logs/**/{rank}/stderr.log")) for line in lines_of(log)]


def lines_of(path: Path) -> Sequence[str]:
    """Of a log; none where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()


def tidy(lines: Iterable[str]) -> tuple[str, ...]:
    """The last of ``lines`` as they may be quoted."""
    told = (without_secrets(ANSI.sub("", line)) for line in lines)  # what is cut is no longer known for a secret
    clean = ("".join(c for c in line if c.isprintable() or c == "\t")[:_TAIL_WIDTH] for line in told)
    # Python underlines parts of a traceback's lines: markers without words.
    return tuple(line for line in clean if line.strip(" ^~\t"))[-_TAIL_LINES:]
