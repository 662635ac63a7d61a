"""Whether a run folder can be written to."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

# Records and logs of a launch need more than this: with less left, it is what broke it.
_NEEDED_BYTES = 64 * 1024

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def means_no_room(error: OSError) -> bool:
    """Whether it was for the disk: full, or the quota, or read-only."""
    return error.errno in _NO_ROOM


def unwritable(folder: Path) -> str:
    """Why nothing more can be written there: the disk is full, or the quota, or it is read-only; empty where it can."""
    probe = folder / f".room-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * _NEEDED_BYTES)
            file.flush()
            os.fsync(file.fileno())  # a network's file system may say so only now
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror or error})"
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return ""
