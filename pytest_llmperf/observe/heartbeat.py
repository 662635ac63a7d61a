"""A thread beside the training loop: says how far it is, what it is doing, and ends a rank that nobody waits for.

The loop itself only increments an integer; reading it, asking the allocator and writing happen here twice a second.
Nothing here imports torch, which a rank may lack.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pytest_llmperf.support.files import boot_id, write_text

_INTERVAL_SECONDS = 0.5


class Heartbeat:
    """Progress of one rank. ``step`` and the others are set by the rank and read by the thread."""

    def __init__(self, folder: Path, rank: int, words: LastWords, *, has_parent: bool = True) -> None:
        """``has_parent``: whoever started it waits for it; a script's own wrapper may have gone."""
        self.step, self.steps, self.tokens_per_step, self.compiles = 0, 0, 0, False
        self._phase = ""
        self._reached: Mapping[str, float] = {}
        self.enter("importing")
        self.reserved_bytes: Callable[[], int] = lambda: 0
        self._path = folder / "progress.json" if rank == 0 else None
        self._words = words
        # torchrun, or nobody where it has gone already and this process belongs to the system's first one.
        pid = os.getppid()
        self._parent = psutil.Process(pid) if has_parent and pid > 1 and psutil.pid_exists(pid) else None
        self._launcher_lock = _launcher_lock(folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="llmperf-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enter(self, phase: str) -> None:
        """Begin ``phase``, unless it has begun."""
        if phase != self._phase:
            # By the clock that a launcher on another host has too; a new mapping each time, since the thread reads it.
            self._phase, self._reached = phase, {**self._reached, phase: time.time()}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.write()

    def _beat(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            if _is_gone(self._parent) or _is_free(self._launcher_lock):
                # torchrun or the launcher was killed and could not reap us: nobody will read what we would write.
                os._exit(1)
            self._words.poll()
            self.write()

    def write(self) -> None:
        """Say now how far it is."""
        if self._path is None:
            return
        beat: dict[str, Any] = {"phase": self._phase, "step": self.step, "steps": self.steps, "time": time.time()}
        beat |= {"reserved_bytes": self.reserved_bytes(), "tokens_per_step": self.tokens_per_step}
        beat |= {"reached": dict(self._reached), "compiles": self.compiles}
        with suppress(OSError):  # a full disk ends the run where its results are written, not here
            write_text(self._path, json.dumps(beat), lasts=False)


def _is_gone(process: psutil.Process | None) -> bool:
    if process is None:
        return False
    try:
        # Where nobody reaps it, as under some containers' first process, one that was killed stays as a zombie.
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _launcher_lock(folder: Path) -> int | None:
    """The file that the launcher keeps locked while it lives, open until this process ends.

    ``None`` where nothing can be known from here.
    """
    # Between two kernels a lock may hold for nobody: on a network's file system, or on a copy of the folder.
    if not boot_id() or os.environ.get("LLMPERF_LAUNCHER_BOOT") != boot_id():
        return None
    try:
        return os.open(folder / "launcher.lock", os.O_RDONLY)
    except OSError:
        return None


def _is_free(lock: int | None) -> bool:
    if lock is None:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, as it should be; any other reason says nothing of the launcher
        return False
    return True


class LastWords:
    """Says what a rank is doing when a signal asks for it: at the time limit, before it is reaped.

    ``stacks-rank-N.txt`` is written by the signal's handler, in C: a rank that waits inside a collective still answers.
    ``trace-rank-N``, collectives by the name that torchfrtrace takes, follows from the heartbeat's thread.
    """

    def __init__(self, folder: Path, rank: int, asked_by: int = signal.SIGUSR1) -> None:
        self._stacks, self._trace = folder / f"stacks-rank-{rank}.txt", folder / f"trace-rank-{rank}"
        self._file = self._stacks.open("w+b")
        faulthandler.register(asked_by, file=self._file, all_threads=True)
        self._told, self._written = False, 0

    def poll(self) -> None:
        """Write the collectives down once the stacks are there: by that file whoever asked knows that this is all."""
        if self._told or not self._are_written():
            return
        self._told = True
        try:
            trace = _collectives(sys.modules.get("torch.distributed"))
            if trace:
                part = self._trace.with_name(f".{self._trace.name}")
                part.write_bytes(trace)
                part.replace(self._trace)
        except Exception as error:  # noqa: BLE001 - whatever a version of torch raises: the stacks are there
            sys.stderr.write(f"llmperf: no flight recorder's trace ({error})\n")

    def close(self) -> None:
        """Leave no empty file; the handler stays, so that a late question ends nobody."""
        if not os.fstat(self._file.fileno()).st_size:
            self._stacks.unlink(missing_ok=True)

    def _are_written(self) -> bool:
        """The handler may still be at it in another thread, or wait for its core; it has the main thread last."""
        try:
            before, self._written = self._written, os.fstat(self._file.fileno()).st_size
            if not self._written or self._written != before:
                return False
            said = os.pread(self._file.fileno(), self._written, 0)
        except OSError:  # a folder that is gone for a moment: the next look tells
            return False
        # Of more threads than faulthandler writes, the main one is among those left out.
        return b"hread 0x%016x" % (threading.main_thread().ident or 0) in said or said.endswith(b"\n...\n")


def _collectives(dist: Any) -> bytes:
    """Torch's record of them; empty before the ranks have met."""
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return b""
    from torch._C import _distributed_c10d as c10d  # noqa: PLC0415 - torch is there by now

    from pytest_llmperf.observe.device import collectives_record  # noqa: PLC0415

    return bytes(getattr(c10d, collectives_record(dist.get_backend()))())
