"""Where a node's server is found by the launches of its job: a socket without a file, for one user alone.

The server and a launch's agent are tasks of two steps and inherit nothing from one another. A name in Linux's
abstract namespace needs no folder that both see (a container may have a ``/tmp`` of its own), and is gone with its
owner; anybody on the node may ask for it, so both ends look at who the other one is.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

import psutil

from pytest_llmperf.launch.forked_agent import ColdStartError, LostServerError
from pytest_llmperf.support.channel import Channel

# Source: unix(7), SO_PEERCRED: process, user and group.
_CREDENTIALS = struct.Struct("3i")


def listening(name: str) -> socket.socket:
    """The server's end.

    Raises:
        OSError: somebody else has that name.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen()
    return listener


def accepted(listener: socket.socket) -> Channel | None:
    """Who has come; ``None``: it was another user's process, or is gone again."""
    with suppress(OSError):
        end, _ = listener.accept()
        if _is_ours(end):
            return Channel(end)
        end.close()
    return None


def connected(name: str) -> tuple[Channel, psutil.Process | None]:
    """A launch's end, and the server; ``None`` where a container hides it.

    Raises:
        ColdStartError: it is not ours.
        LostServerError: nobody is there.
    """
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(f"\0{name}")
    except OSError as error:
        end.close()
        raise LostServerError(f"its fork server is gone ({error})") from None
    if not _is_ours(end):
        end.close()
        raise ColdStartError("another user's process has the name of its fork server")
    pid, _ = _credentials(end)
    return Channel(end), psutil.Process(pid) if pid > 0 and psutil.pid_exists(pid) else None


def process_namespace() -> str:
    """Within which a pid means one process: a container may have its own."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it points to nothing


def _is_ours(end: socket.socket) -> bool:
    return _credentials(end)[1] == os.getuid()


def _credentials(end: socket.socket) -> tuple[int, int]:
    pid, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user
