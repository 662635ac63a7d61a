"""Histories: revisions of a git project, each in a clone of its own; or versions by a command for each. The interpreter
of each, a candidate, is in a folder of the cache that one process makes once: complete, or made anew."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from filelock import FileLock

from pytest_llmperf.launch.scratch import means_no_room
from pytest_llmperf.records.result import Candidate
from pytest_llmperf.support.files import cache_folder, hashed, refuse_others_folder, write_text
from pytest_llmperf.support.user_input import hint

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
_OF_A_HOOK = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"}


class HistoryError(Exception):
    """No candidates can be told from what was given."""


class NotMadeError(Exception):
    """This candidate has no interpreter: it could not be checked out, installed or asked."""


class NoRoomError(NotMadeError):
    """The same for a disk that is full: no other candidate would be made either."""


@dataclass(frozen=True)
class Span:
    good: Candidate
    candidates: tuple[Candidate, ...]
    """After the good end, each after its parents; the last is the bad end."""
    notes: tuple[str, ...] = ()


def made(kind: str, key: Sequence[str], make: Callable[[Path], None]) -> Path:
    """The folder of ``key``; ``make`` fills it where it is not there yet. NotMadeError: nothing of it is left."""
    digest = hashed(json.dumps(list(key)))
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


def run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    """What ``command`` prints; NotMadeError, with the last line that it said, where it fails."""
    try:
        done = finished(command, _LONGEST, cwd)
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


def finished(command: Sequence[str], seconds: float, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``command`` at its end; OSError or TimeoutExpired as of ``subprocess.run``. What it has started ends with it: a
    compiler would go on writing to a folder that is removed. It hears nothing of what a hook of git tells."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**kept, "LC_ALL": "C"},
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


_SECONDS = 120.0
_FIELDS = "%H%x00%P%x00%an%x00%as%x00%s"
_LINE = 5
# Whether PYTHONSAFEPATH is heeded.
_HAS_SAFE_PATH = sys.version_info >= (3, 11)
#: What a command has in place of a version.
PLACE = "{version}"


@dataclass(frozen=True)
class GitHistory:
    folder: Path
    paths: Sequence[str] = ()
    """Folders of the project that are put on the path; its own, and ``src`` where there is one, if none is given."""
    build: str = ""
    """A shell's line that is run in each checkout before it is used."""
    first_parent: bool = False
    """Whether a merge counts as one change."""

    @cached_property
    def root(self) -> Path:
        """The top of its work tree; HistoryError where there is none."""
        if not (found := self._git("rev-parse", "--show-toplevel")):
            raise HistoryError(
                f"{self.folder} is in no git repository: expected a project's checkout, by --project DIR, or "
                "versions, by --python COMMAND"
            )
        return Path(found.strip())

    @property
    def key(self) -> tuple[str, ...]:
        """What makes its interpreters other than those of the same names elsewhere."""
        return ("git", "safe path", str(self.root), self.build, *self.paths)

    def span(self, good: str, bad: str) -> Span:
        """What is between the ends that were named; HistoryError where they are none, or not in this order."""
        if not _HAS_SAFE_PATH and Path.cwd().resolve().is_relative_to(self.root.resolve()):
            raise HistoryError(
                f"in {self.root} Python before 3.11 would import the checkout in place of each revision: run it in "
                f"another folder, with --project {shlex.quote(str(self.root))}, or with Python 3.11 or newer"
            )
        first, last = self._commit("--good", good), self._commit("--bad", bad)
        if first == last:
            raise HistoryError(f"--good {good} and --bad {bad} are the same commit, {first[:12]}")
        if self._git("merge-base", "--is-ancestor", first, last) is None:
            if self._git("merge-base", "--is-ancestor", last, first) is not None:
                raise HistoryError(f"--good {good} comes after --bad {bad}: exchange them, good is where it began")
            base = (self._git("merge-base", first, last) or "").strip()[:12]
            hint = f"; both have {base}, which may serve as --good" if base else ""
            raise HistoryError(f"--good {good} is no ancestor of --bad {bad}{hint}")
        candidates = self._listed(f"{first}..{last}")
        (begin,) = self._listed("-1", first)
        changed = (self._git("status", "--porcelain") or "").splitlines()
        note = f"{len(changed)} files of {self.root} are not as committed; commits alone are compared"
        good_end = Candidate(begin.name, (), begin.subject, begin.author, begin.date, True)
        return Span(good_end, candidates, (note,) if changed else ())

    def python(self, candidate: Candidate) -> str:
        """An interpreter that has it; NotMadeError where there is none."""
        return probed(str(self._made(candidate) / "python"))

    def tree(self, name: str) -> Path:
        """``folder`` as it was at the revision ``name``; HistoryError: there is none; NotMadeError."""
        made = self._made(Candidate(self._commit("revision", name)))
        tree = made / "tree" / self.folder.resolve().relative_to(self.root.resolve())
        if not tree.is_dir():
            raise NotMadeError(f"there was no {self.folder} at {name}")
        return tree

    def _made(self, candidate: Candidate) -> Path:
        """The folder of its interpreter and of its ``tree``."""

        def make(folder: Path) -> None:
            tree = folder / "tree"
            # Its own index and HEAD, and the objects of the user's repository, in which nothing is written.
            run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(self.root), str(tree)])
            run(["git", "-C", str(tree), "checkout", "--quiet", "--detach", candidate.name])
            if self.build:
                run(["sh", "-c", self.build], cwd=tree)
            paths = [tree / path for path in self.paths] or [tree, *(path for path in [tree / "src"] if path.is_dir())]
            if (missing := next((path for path in paths if not path.is_dir()), None)) is not None:
                raise NotMadeError(f"there is no folder {missing.relative_to(tree)} in it")
            joined = os.pathsep.join(map(str, paths))
            # What a launch put first is this package itself, which is today's in every candidate.
            lines = [
                'first=${PYTHONPATH%%:*} rest=${PYTHONPATH#"${PYTHONPATH%%:*}"}',
                f"PYTHONPATH=${{first:+$first:}}{shlex.quote(joined)}$rest",
                # Started in the project itself, -m would put the checkout before all of that.
                "PYTHONSAFEPATH=1",
                "export PYTHONPATH PYTHONSAFEPATH",
                f'exec {shlex.quote(sys.executable)} "$@"',
            ]
            script(folder / "python", lines)

        return made("git", (*self.key, candidate.name, sys.executable), make)

    def further(self, candidate: Candidate) -> str:
        """A command that shows what is in it."""
        return shlex.join(["git", "-C", str(self.root), "show", candidate.shown])

    def _commit(self, option: str, name: str) -> str:
        if not (found := self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")):
            raise HistoryError(f"{option} {name}: no such revision in {self.root}")
        return found.split()[-1]

    def _listed(self, *what: str) -> tuple[Candidate, ...]:
        first = ["--first-parent"] if self.first_parent else []
        said = self._git("log", "--reverse", "--topo-order", *first, f"--format={_FIELDS}", *what, "--") or ""
        lines = (line.split("\0") for line in said.split("\n"))  # a subject may have what else ends a line in Python
        return tuple(
            Candidate(name, tuple(parents.split()[: 1 if self.first_parent else None]), subject, author, date, True)
            for name, parents, author, date, subject in filter(lambda values: len(values) == _LINE, lines)
        )

    def _git(self, *arguments: str) -> str | None:
        """What git prints; ``None`` where it fails."""
        try:
            done = finished(["git", "-C", str(self.folder), *arguments], _SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HistoryError(f"git cannot be asked ({error})") from error
        return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True)
class CommandHistory:
    """Each version by a command that is its interpreter (another environment's, a container's); as ``GitHistory``."""

    command: str
    versions: Sequence[str]

    def __post_init__(self) -> None:
        if PLACE not in self.command:
            raise HistoryError(f"--python {self.command}: expected {PLACE} in it, e.g. /envs/torch-{PLACE}/bin/python")
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise HistoryError(f"--python {self.command}: no command ({error})") from error
        if not self.versions:
            raise HistoryError("--python needs --versions: which there are, the oldest first, e.g. 2.8.0,2.9.1,2.10.0")

    @property
    def key(self) -> tuple[str, ...]:
        # Words may name files of this folder; another one has others by the same names.
        return ("command", self.command, str(Path.cwd()))

    def span(self, good: str, bad: str) -> Span:
        for option, version in (("--good", good), ("--bad", bad)):
            if version not in self.versions:
                known = ",".join(self.versions)
                raise HistoryError(f"{option} {version}: none of --versions {known}{hint(version, self.versions)}")
        first, last = self.versions.index(good), self.versions.index(bad)
        if first == last:
            raise HistoryError(f"--good {good} and --bad {bad} are the same version")
        if first > last:
            raise HistoryError(f"--good {good} comes after --bad {bad} in --versions, which has the oldest first")
        line = self.versions[first : last + 1]
        return Span(Candidate(line[0]), tuple(Candidate(name, (before,)) for before, name in pairwise(line)))

    def python(self, candidate: Candidate) -> str:
        words = [word.replace(PLACE, candidate.name) for word in shlex.split(self.command)]

        def make(folder: Path) -> None:
            script(folder / "python", [f'exec {shlex.join(words)} "$@"'])

        return probed(str(made("command", (*self.key, candidate.name), make) / "python"))

    def further(self, candidate: Candidate) -> str:
        return f"{self.command.replace(PLACE, candidate.name)} -m pip list"


#: Where candidates come from.
History: TypeAlias = GitHistory | CommandHistory
