"""All processes of a user's own command, wherever they went, ended where they stand; and the memory that they shared.

Ranks lead sessions of their own, and a daemon belongs to the system's first process: its environment tells whose it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_PROCESSES = Path("/proc")
# POSIX shared memory, and semaphores.
_SHARED = Path("/dev/shm")  # noqa: S108 - it is the system's
# A process that forks while others are stopped is found in the next round.
_ROUNDS = 20
# To leave a GPU takes a process some.
_GONE_SECONDS, _POLL_SECONDS = 10.0, 0.02


class WholeTree:
    """The processes that have ``variable`` in their environment, which names one launch: nobody else's."""

    def __init__(self, variable: str) -> None:
        self._variable = variable.encode()
        self._shared_before = _shared()

    def end(self, descendants: Callable[[], set[psutil.Process]]) -> None:
        """Stop them and ``descendants``, so that none sees another go, and kill them: no handler of theirs runs.

        What they alone had in shared memory goes, unless it was there before them.
        """
        stopped, shared = set[psutil.Process](), set[Path]()
        try:
            for _ in range(_ROUNDS):
                found = (descendants() | self._marked()) - stopped
                if not found:
                    break
                for process in found:
                    with suppress(psutil.Error):
                        process.suspend()
                stopped |= found
            shared = _used(process.pid for process in stopped) - self._shared_before
        finally:  # Ctrl-C leaves none of them stopped
            for process in stopped:
                with suppress(psutil.Error):
                    process.kill()
        deadline = time.monotonic() + _GONE_SECONDS
        while any(map(is_alive, stopped)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        left = shared & _shared()
        for path in left - _used(psutil.pids()) if left else ():
            with suppress(OSError):
                if path.lstat().st_uid == os.geteuid():
                    path.unlink()

    def _marked(self) -> set[psutil.Process]:
        found = set()
        for pid in psutil.pids():
            with suppress(OSError, psutil.Error):
                if self._variable in (_PROCESSES / f"{pid}/environ").read_bytes().split(b"\0"):
                    found.add(psutil.Process(pid))
        return found


def is_alive(process: psutil.Process) -> bool:
    """Whether it is more than an entry that its parent has not looked at."""
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _shared() -> set[Path]:
    with suppress(OSError):
        return set(_SHARED.iterdir())
    return set()


def _used(pids: Iterable[int]) -> set[Path]:
    """Files that these processes have mapped or open."""
    found = set[Path]()
    for folder in (_PROCESSES / str(pid) for pid in pids):
        with suppress(OSError):
            lines = (folder / "maps").read_text(errors="replace").splitlines()
            found |= {Path(line.split(maxsplit=5)[5]) for line in lines if str(_SHARED) in line}
        for link in folder.glob("fd/*"):
            with suppress(OSError):
                found.add(link.readlink())
    return found
