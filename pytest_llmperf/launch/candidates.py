"""Candidates: interpreters of other environments, each in a folder of the cache that one process makes once.

A folder is complete or made anew. ``histories`` says which candidates there are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock

from pytest_llmperf.launch.scratch import means_no_room
from pytest_llmperf.records.past_result import Candidate
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.folders import cache_folder, refuse_others_folder

# A wheel of torch is fetched and unpacked within that, seconds; a project is built.
_LONGEST = 3600.0
_COMPLETE = "complete"
# As the system says it, in the words of whichever command met it.
_NO_ROOM = ("No space left on device", "Disk quota exceeded")
# What a launch needs, asked without importing it.
_NEEDED = ["torch", "transformers", "accelerate", "psutil", "msgspec"]
_PROBE = f"""
import importlib.util, json, sys
print(json.dumps([name for name in {_NEEDED} if importlib.util.find_spec(name) is None]))
"""
_PROBE_SECONDS = 120.0


class HistoryError(Exception):
    """No candidates can be told from what was given."""


class NotMadeError(Exception):
    """This candidate has no interpreter: it could not be checked out, installed or asked."""


class NoRoomError(NotMadeError):
    """The same for a disk that is full: no other candidate would be made either."""


@dataclass(frozen=True)
class Span:
    """What lies between two ends."""

    good: Candidate
    candidates: tuple[Candidate, ...]
    """After the good end, each after its parents; the last is the bad end."""
    notes: tuple[str, ...] = ()
    """What a reader should know of them."""


class History(Protocol):
    """Where candidates come from."""

    @property
    def key(self) -> tuple[str, ...]:
        """What makes its interpreters other than those of the same names elsewhere."""

    def span(self, good: str, bad: str) -> Span:
        """What is between the ends that were named; HistoryError where they are none, or not in this order."""

    def python(self, candidate: Candidate) -> str:
        """An interpreter that has it; NotMadeError where there is none."""

    def further(self, candidate: Candidate) -> str:
        """A command that shows what is in it."""


def made(kind: str, key: Sequence[str], make: Callable[[Path], None]) -> Path:
    """The folder of ``key``; ``make`` fills it where it is not there yet.

    Raises NotMadeError where it could not be made, and nothing of it is left.
    """
    digest = hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()[:16]
    folder = cache_folder("candidates") / f"{kind}-{digest}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        refuse_others_folder(folder.parent)
        refuse_others_folder(folder)
        with FileLock(f"{folder}.lock"):
            if not (folder / _COMPLETE).exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                try:
                    make(folder)
                    write_text(folder / _COMPLETE, "")
                except BaseException:  # Ctrl-C too: half of an environment would train something else
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
    except OSError as error:
        failed = NoRoomError if means_no_room(error) else NotMadeError
        raise failed(f"{folder} cannot be made ({error.strerror or error})") from error
    return folder


def run(command: Sequence[str], *, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What ``command`` prints; NotMadeError, with the last line that it said, where it fails."""
    try:
        done = finished(command, _LONGEST, cwd, environment)
    except subprocess.TimeoutExpired as error:
        raise NotMadeError(f"{shlex.join(command[:4])} took more than {_LONGEST:.0f} s") from error
    except OSError as error:
        raise NotMadeError(f"{command[0]} cannot be run ({error.strerror or error})") from error
    if done.returncode:
        said = _said(done)
        why = next((line for line in reversed(said) if line.lower().startswith(("error", "fatal"))), said[-1])
        failed = NoRoomError if any(words in line for line in said for words in _NO_ROOM) else NotMadeError
        raise failed(f"{shlex.join(command[:6])}: {why}")
    return done.stdout


def finished(
    command: Sequence[str], seconds: float, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``command`` at its end, or after so many ``seconds``; OSError or TimeoutExpired as of ``subprocess.run``.

    However it ends, what it has started ends with it: a compiler would go on writing to a folder that is removed.
    """
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, said = process.communicate(timeout=seconds)
        except BaseException:  # Ctrl-C and SIGTERM reach us alone
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, printed, said)


def _said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of what it said, or its exit code."""
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return said or [f"exit code {done.returncode}"]


def script(path: Path, lines: Sequence[str]) -> str:
    """An interpreter that is a shell's script; its path."""
    write_text(path, "\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def probed(python: str) -> str:
    """``python``, if it has what a launch needs; else NotMadeError."""
    try:
        done = finished([python, "-c", _PROBE], _PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMadeError(f"its Python does not run ({error})") from error
    missing: object = None
    with suppress(ValueError, IndexError):
        missing = json.loads(done.stdout.splitlines()[-1])
    if not isinstance(missing, list):
        raise NotMadeError(f"its Python does not run ({_said(done)[-1]})")
    if missing:
        raise NotMadeError(f"its Python has no {missing[0]}")
    return python
