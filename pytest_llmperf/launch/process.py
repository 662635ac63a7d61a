"""One process tree from its start to its end: nothing of it outlives ``watch``, whoever started it."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

_POLL_SECONDS = 0.05

# torchrun gives its ranks 30 s after SIGTERM before it kills them itself.
_GRACE_SECONDS = 35.0


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    returncode: int
    timed_out: bool
    seconds: float
    where: str = ""
    """For a sentence: `` on node n2``; empty where there is only one."""
    oom_kills: int = 0
    """Processes of this host that the kernel has ended meanwhile because memory was short."""


class Started(Protocol):
    """A process that was started, by whomever; what ``subprocess.Popen`` has of the same names."""

    pid: int

    def poll(self) -> int | None:
        """Its return code, negative for a signal's; ``None`` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its return code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """

    def terminate(self) -> None:
        """Send it SIGTERM, if it still runs."""

    def kill(self) -> None:
        """Send it SIGKILL, if it still runs."""


def start(command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Started:
    """Start ``command`` with its output in ``log``.

    Raises:
        OSError: the command cannot be started, or the log cannot be written.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal reaches us alone, and we end the tree in order
        )


def watch(
    starting: Callable[[], Started],
    *,
    timeout_seconds: float,
    pid_files: Callable[[], Iterable[Path]],
    poll: Callable[[], object],
    at_timeout: Callable[[int], None] = lambda _: None,
) -> Ended:
    """Call ``poll`` while what ``starting`` starts runs, and reap its whole tree; the time is that from its start.

    ``pid_files`` names files in which descendants wrote their pids: ranks lead sessions of their own, and one whose
    parent is gone is found only there. ``at_timeout`` is called with its pid before what took too long is
    ended.
    """
    begun, oom_kills = time.monotonic(), _oom_kills()
    process = starting()
    tree = _Tree(process, pid_files)
    timed_out = False
    try:
        while process.poll() is None:
            if time.monotonic() - begun > timeout_seconds:
                timed_out = True
                at_timeout(process.pid)
                break
            poll()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
    finally:
        seconds = time.monotonic() - begun
        returncode = tree.reap()
    oom_kills = _oom_kills() - oom_kills
    return Ended(returncode=returncode, timed_out=timed_out, seconds=seconds, oom_kills=oom_kills)


def _oom_kills() -> int:
    """Since the system began; of a container's limit too."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class _Tree:
    """A process and all that descends from it."""

    def __init__(self, process: Started, pid_files: Callable[[], Iterable[Path]]) -> None:
        self._process, self._pid_files = process, pid_files
        try:
            self._born = psutil.Process(process.pid).create_time()
        except psutil.Error:
            self._born = math.inf  # it is gone already, and has no descendants

    def reap(self) -> int:
        """End everything: politely first, since only SIGTERM makes torchrun end its ranks. Ctrl-C only hurries.

        Returns the process's return code.
        """
        survivors = self._descendants()
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_SECONDS)
        finally:
            returncode = self._kill(survivors)
        return returncode

    def _kill(self, survivors: set[psutil.Process]) -> int:
        survivors |= self._descendants()
        if self._process.poll() is None:
            self._process.kill()
        for process in survivors:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(survivors, timeout=5)
        try:
            return self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:  # whoever was to tell of its end does not
            return -signal.SIGKILL

    def _descendants(self) -> set[psutil.Process]:
        found: set[psutil.Process] = set()
        with suppress(psutil.Error):
            found |= set(psutil.Process(self._process.pid).children(recursive=True))
        for path in self._pid_files():
            with suppress(OSError, ValueError, psutil.Error):
                process = psutil.Process(int(path.read_text(encoding="ascii")))
                # Ours were born after the launch began and before they wrote their file. Anything else is a file that
                # tells nonsense, or a pid that was given anew: never end a process that we did not start.
                if self._born <= process.create_time() <= path.stat().st_mtime + 1:
                    found.add(process)
                    found |= set(process.children(recursive=True))
        return found


def signal_name(returncode: int) -> str | None:
    """``SIGKILL`` for -9 or 137; ``None`` for a code that is no signal's."""
    number = -returncode if returncode < 0 else returncode - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return None
