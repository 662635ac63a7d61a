"""What a rank is doing, told when it is asked by SIGUSR1: at the time limit, before it is reaped.

The stacks are written by the signal's handler, in C: a rank that waits inside a collective still answers, and no
package is needed. The collectives (torch's flight recorder, of gloo too) follow from the heartbeat's thread.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


class LastWords:
    """One rank's files: ``stacks-rank-N.txt``, and ``trace-rank-N``, a pickle by the name that torchfrtrace takes."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._stacks, self._trace = folder / f"stacks-rank-{rank}.txt", folder / f"trace-rank-{rank}"
        self._file = self._stacks.open("w+b")
        faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True)
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
    """What torch recorded; nothing before the ranks have met."""
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return b""
    from torch._C import _distributed_c10d as c10d  # noqa: PLC0415 - torch is there by now

    from pytest_llmperf.observe.device import collectives_record  # noqa: PLC0415

    return bytes(getattr(c10d, collectives_record(dist.get_backend()))())
