"""One node's fork servers, started by srun for the whole run: ``python -m …node_server NAME FOLDER cpu|gpu PYTHON``.

The agents of the node's launches (``node_agent.py``) find it by NAME and ask it as the pytest process asks its own
servers on one machine: what it forks is torchrun's agent, with the environment of the launch's own step. It ends when
its standard input does, that is with the pytest process, however that ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pytest_llmperf.launch.device import OF_A_STEP, RECORD
from pytest_llmperf.launch.fork_servers import ServerKey, ServerPool
from pytest_llmperf.launch.forked_agent import WAITS, ColdStartError, ForkedAgent, LaunchOrder, LostServerError
from pytest_llmperf.launch.process import package_path, reap
from pytest_llmperf.launch.scratch import scratch
from pytest_llmperf.launch.slurm.cluster import node_name
from pytest_llmperf.support.channel import Channel, ChannelClosedError, Message

# Source: unix(7), SO_PEERCRED: process, user and group.
_CREDENTIALS = struct.Struct("3i")

# A SIGTERM waits for no longer until it is looked at.
_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.05
_WORD_SECONDS = 2.0
# Whoever connects asks at once; the node may be busy.
_ASK_SECONDS = 30.0

# Of a step, a node or a launch; what a spec sets is not among them.
_PASSING = ("SLURM", "SRUN_", "PMI", "TORCHELASTIC_")
# Compilers keep what they made below the step's TMPDIR.
_OF_A_LAUNCH = frozenset({"TMPDIR", RECORD, *OF_A_STEP, "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"})


def connected(name: str) -> tuple[Channel, psutil.Process | None]:
    """A launch's end, and the server of this ``name``; ``None`` where a container hides it.

    Raises ColdStartError where it is not ours, LostServerError where nobody is there.
    """
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(f"\0{name}")
    except OSError as error:
        end.close()
        raise LostServerError(f"its fork server is gone ({error})") from None
    pid, user = _credentials(end)
    if user != os.getuid():
        end.close()
        raise ColdStartError("another user's process has the name of its fork server")
    return Channel(end), psutil.Process(pid) if pid > 0 and psutil.pid_exists(pid) else None


def _credentials(end: socket.socket) -> tuple[int, int]:
    pid, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def process_namespace() -> str:
    """Within which a pid means one process: a container may have its own."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it points to nothing


def server_key(
    python: str, environment: Mapping[str, str], homes: Sequence[str], folder: str, *, on_gpu: bool
) -> ServerKey:
    """Name the server for ranks in ``environment``, whose ``PYTHONPATH`` begins with one of ``homes``."""
    lasting = {
        name: value for name, value in environment.items() if name not in _OF_A_LAUNCH and not name.startswith(_PASSING)
    }
    path = [part for part in lasting.pop("PYTHONPATH", "").split(os.pathsep) if part and part not in homes]
    lasting |= {"PYTHONPATH": os.pathsep.join(path)} if path else {}
    return ServerKey.for_rank(python, lasting, folder, on_gpu=on_gpu)


class _NobodyError(Exception):
    """Nobody waits any more for what is done: the launch's agent is gone, or the run."""


class NodeServer:
    """Serves one launch after the other: a node is leased to one at a time."""

    def __init__(self, listener: socket.socket, pool: ServerPool, word: str) -> None:
        """``word`` is how this interpreter is called on a command line."""
        self._listener, self._pool, self._word = listener, pool, word
        self._is_told_to_end = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def serve(self) -> None:
        """Until the run is over, or SLURM ends the step."""
        while not self._is_told_to_end and not _is_over():
            select.select([self._listener, sys.stdin], [], [], _LOOK_SECONDS)
            if not _is_readable(self._listener):
                continue
            with suppress(ChannelClosedError, _NobodyError, OSError):  # an OSError: whoever has come is gone again
                end, _ = self._listener.accept()
                with end:
                    if _credentials(end)[1] == os.getuid():
                        self._serve(Channel(end))

    def _serve(self, channel: Channel) -> None:
        asked = channel.receive(_ASK_SECONDS)
        if asked is None:
            return
        agent = None
        try:
            agent = self._forked(channel, asked)
            channel.send({"began": agent.pid})
            while (returncode := agent.poll()) is None:
                _look(channel)
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(_POLL_SECONDS)
            if not agent.lost_server:  # else how it ended is not known, and a closed channel says that
                channel.send({"ended": agent.pid, "returncode": returncode})
        except ColdStartError as error:
            channel.send({"refused": str(error)})
        except OSError as error:
            channel.send({"refused": f"no fork server could be asked ({error})"})
        finally:
            for file in asked.files:
                os.close(file)
            if agent is not None:
                reap(agent, set)

    def _forked(self, channel: Channel, asked: Message) -> ForkedAgent:
        content = asked.content
        environment, folder = content["environment"], content["folder"]
        if content["processes"] != process_namespace():
            raise ColdStartError("its container has processes of its own, and so has its fork server's")
        for path in (folder, environment.get("TMPDIR", folder), content["torchrun"][-1]):
            if not Path(path).is_dir():
                raise ColdStartError(f"its fork server sees no folder {path}, in a container of its own")
        log = Path(f"/proc/self/fd/{asked.files[0]}")
        order = LaunchOrder(torchrun=content["torchrun"], environment=environment, needs=content["needs"], log=log)
        # The word by which this process was started, too, is this interpreter.
        python = sys.executable if content["python"] == self._word else content["python"]
        key = server_key(python, environment, content["homes"], folder, on_gpu=content["on_gpu"])
        return self._pool.launch(key, order, _telling(channel))

    def _on_sigterm(self, *_: object) -> None:
        # SLURM tells every step of the job at once: the launch's own agent reaps it, and says why it ended.
        self._is_told_to_end = True


def _telling(channel: Channel) -> Callable[[], None]:
    """Looks as ``_look`` does, and says now and then that this process runs."""
    said = time.monotonic()

    def look() -> None:
        nonlocal said
        _look(channel)
        if time.monotonic() - said > _WORD_SECONDS:
            channel.send({WAITS: True})
            said = time.monotonic()

    return look


def _look(channel: Channel) -> None:
    """Raise _NobodyError where nobody waits any more."""
    try:
        channel.receive(0)
    except ChannelClosedError:
        raise _NobodyError from None
    if _is_over():
        raise _NobodyError


def _is_over() -> bool:
    """Whether the run is: its end of this process' standard input is closed, and nothing is ever written there."""
    return _is_readable(sys.stdin) and not os.read(sys.stdin.fileno(), 4096)


def _is_readable(file: Any) -> bool:
    return bool(select.select([file], [], [], 0)[0])


def main(arguments: Sequence[str]) -> None:
    """See above."""
    node, on_gpu = node_name(), arguments[2] == "gpu"
    folder = Path(arguments[1]) / node
    with scratch(of_job=True) as place, socket.socket(socket.AF_UNIX) as listener:
        place.is_whole = True  # what launches compile, their agents see end
        listener.bind(f"\0{arguments[0]}-{node}")
        listener.listen()
        folder.mkdir(parents=True)
        # What is forked shows the environment of its server to whoever looks for a job's processes.
        marks = {name: value for name, value in os.environ.items() if name.startswith(_PASSING)}
        pool = ServerPool(lambda: folder, marks)
        try:
            environment = {**os.environ, **place.variables}
            here = os.getcwd()  # noqa: PTH109 - a string is wanted
            pool.prepare(server_key(sys.executable, environment, [package_path()], here, on_gpu=on_gpu))
            NodeServer(listener, pool, arguments[3]).serve()
        finally:
            pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
