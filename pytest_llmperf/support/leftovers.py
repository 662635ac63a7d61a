"""Leftovers: files and folders that name the process that made them, so that the next one knows when it was killed."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from pytest_llmperf.support.boot_id import boot_id

_UNTOUCHED_SECONDS = 24 * 3600.0


@cache
def _space() -> str:
    """Within which a pid means one process: another host, or a container, has its own."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it points to nothing
    return hashlib.sha256(f"{boot_id()} {namespace}".encode()).hexdigest()[:8]


def mark() -> str:
    """Of this process, for the name of what it must not leave."""
    return f"{_space()}-{os.getpid()}"


def is_left(path: Path, space: str, pid: int) -> bool:
    """Whether the process that the name of ``path`` tells of is gone; of another host: a day after its last write.

    Raises:
        OSError: ``path`` is gone.
    """
    if space == _space():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False
    return time.time() - path.lstat().st_mtime > _UNTOUCHED_SECONDS
