"""The rendezvous: where the nodes of one launch meet."""

from __future__ import annotations

import socket
import zlib
from contextlib import suppress
from pathlib import Path

from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.slurm.node_info import NodeFacts

_PORTS = range(20000, 32000)  # below the ports that Linux hands out by itself


def endpoint(first: NodeFacts, folder: Path) -> str:
    """Where the nodes meet: on the first one, at a port of this launch's own, seen free if that node is this one."""
    start = zlib.crc32(str(folder).encode()) % len(_PORTS)
    candidates = [_PORTS[(start + step) % len(_PORTS)] for step in range(50)]
    is_here = first.host == socket.gethostname() or first.host.split(".")[0] == socket.gethostname().split(".")[0]
    port = next((port for port in candidates if not is_here or _is_free(port)), candidates[0])
    return f"{controller.address(first.node)}:{port}"


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return True
    return False
