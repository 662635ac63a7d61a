"""A thread beside the training loop: says how far it is, and ends the rank when nobody waits for it any more.

The loop itself only increments an integer; reading it, asking the allocator and writing happen here twice a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from pytest_llmperf.worker.files import write_json

_INTERVAL_SECONDS = 0.5


class Heartbeat:
    """Progress of one rank. ``phase``, ``step`` and ``steps`` are set by the rank and read by the thread."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.phase, self.step, self.steps, self.tokens_per_step = "importing", 0, 0, 0
        self.reserved_bytes: Callable[[], int] = lambda: 0
        self._path = folder / "progress.json" if rank == 0 else None
        self._parents = _parents()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="llmperf-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            if not all(_is_alive(parent) for parent in self._parents):
                # torchrun or the launcher was killed and could not reap us: nobody will read what we would write.
                os._exit(1)
            if self._path is not None:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        beat = {"phase": self.phase, "step": self.step, "steps": self.steps, "time": time.time()}
        beat |= {"reserved_bytes": self.reserved_bytes(), "tokens_per_step": self.tokens_per_step}
        try:
            write_json(path, beat)
        except OSError:
            return  # a full disk ends the run where its results are written, not here


def _is_alive(process: psutil.Process) -> bool:
    try:
        # Where nobody reaps it, as under some containers' first process, one that was killed stays as a zombie.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _parents() -> list[psutil.Process]:
    pids = [os.getppid(), int(os.environ.get("LLMPERF_LAUNCHER_PID", "0"))]
    # A pid that is not visible here (another container or node) cannot be watched.
    return [psutil.Process(pid) for pid in pids if pid > 1 and psutil.pid_exists(pid)]
