"""A thread beside the training that writes down how little memory was left: a rank that dies of it may say no word.

A library that gets no memory for a thread or inside one ends the process at once, and then this file is all that tells.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pytest_llmperf.worker.memory_limit import Headroom

_INTERVAL_SECONDS = 0.5

# A limit is come to within a step; a look takes some 20 us.
_CAPPED_SECONDS = 0.02


# The file is written over, so its words are padded to the same length.
_WIDTH = 256


@contextmanager
def watched(headroom: Headroom, path: Path, *, to_be_capped: bool) -> Iterator[None]:
    """Keep at ``path`` the least room that was seen of ``headroom``.

    Entered before the limit is set: the thread's own stack is none of what the training takes.
    """
    stop, seconds = threading.Event(), _CAPPED_SECONDS if to_be_capped else _INTERVAL_SECONDS
    with path.open("wb", buffering=0) as file:
        thread = threading.Thread(
            target=_watch, args=(headroom, file.fileno(), stop, seconds), name="llmperf-room", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _watch(headroom: Headroom, file: int, stop: threading.Event, seconds: float) -> None:
    told = None
    while not stop.wait(seconds):
        # At the limit nothing but small things may be had, and even they may fail: the next look comes soon. A full
        # disk ends the run where its results are written, not here.
        with suppress(OSError, MemoryError):
            headroom.look()
            least = headroom.least
            if least is not None and least != told:
                os.pwrite(file, json.dumps(least.to_dict()).ljust(_WIDTH).encode(), 0)
                told = least
