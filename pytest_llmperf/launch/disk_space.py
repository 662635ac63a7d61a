"""Run folders as the launcher and the nodes' agents write them, and whether they can."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

# Records and logs of a launch need more than this: with less left, it is what broke it.
_NEEDED_BYTES = 64 * 1024

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` whole or not at all.

    Raises:
        OSError: it cannot be written; the error names the file, which one of a full disk does not by itself.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


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
