"""Forks of one process that has imported a node's agent, which a fake srun would start anew for each node."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pytest_llmperf.launch.slurm.node import run_part
from tests.template import _begin_as

REPOSITORY = Path(__file__).parents[2]
_LONGEST_REQUEST, _STREAMS = 2**17, 3

#: What a script does to be such an agent, whose words are ``sys.argv[4:]``: it hands on signals, and ends as that does.
ASK = """
    import socket
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.connect(AGENTS)
    request = {"folder": os.getcwd(), "environment": dict(os.environ), "words": sys.argv[4:]}
    socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
    signal.signal(signal.SIGTERM, lambda number, _: asked.send(bytes([number])))
    code = int(asked.recv(16))
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
"""


@contextmanager
def agents() -> Iterator[str]:
    """The address at which they are asked for."""
    address = f"\0agents-{os.getpid()}"
    words = [sys.executable, "-m", "tests.slurm.agents", address[1:]]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()  # it listens
        yield address
        process.stdin.close()


def serve(address: str) -> None:
    """Until nobody holds the standard input."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        print(flush=True)  # noqa: T201 - it listens
        while 0 not in select.select([0, listener.fileno()], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _between(connection)
            connection.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _between(connection: socket.socket) -> None:
    """Hands signals on to an agent, and tells how it ended; whoever was killed while he waits had it killed too."""
    message, fds, *_ = socket.recv_fds(connection, _LONGEST_REQUEST, _STREAMS)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _agent(json.loads(message), fds)
    for fd in fds:
        os.close(fd)
    agent = os.pidfd_open(pid)
    while agent not in select.select([agent, connection.fileno()], [], [])[0]:
        number = connection.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
        if not number:
            break
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _agent(request: Mapping[str, Any], fds: list[int]) -> None:
    """What the module's last lines do with an agent's words."""
    code = 1
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        _begin_as(request)
        words = request["words"]
        at = words.index("--")
        code = run_part(Path(words[0]), float(words[1]), words[2:at], words[at + 1 :])
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
