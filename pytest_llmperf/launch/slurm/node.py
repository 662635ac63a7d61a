"""A node's two processes, both started by srun.

``python -m …node server NAME FOLDER cpu|gpu PYTHON``, for the whole run: the node's fork servers. Agents find it by
NAME and ask it as the pytest process asks its own servers on one machine: what it forks is torchrun's agent, with the
environment of the launch's own step. It ends when its standard input does, that is with the pytest process.

``python -m …node agent FOLDER SECONDS [OFFER] -- COMMAND``, for one launch: it runs torchrun on its node (COMMAND, or a
fork of the server that OFFER names), watches the node's GPUs, keeps what a hanging rank was doing, reaps, and leaves in
the shared folder that it began (``node-NAME.json``) and how it ended (``node-NAME.end.json``). A node that left the
first and not the second is one that failed.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from pytest_llmperf.launch import process
from pytest_llmperf.launch.device import OF_A_STEP, RECORD, Gpu, shown
from pytest_llmperf.launch.fork_servers import (
    WAITS,
    ColdStartError,
    Conversation,
    ForkedAgent,
    LaunchOrder,
    LostServerError,
    NoAnswerError,
    ServerKey,
    ServerPool,
)
from pytest_llmperf.launch.machine import find_machine
from pytest_llmperf.launch.process import package_path, reap
from pytest_llmperf.launch.request import BEFORE_WORDS
from pytest_llmperf.launch.scratch import UNWRITABLE, scratch
from pytest_llmperf.launch.script import ScriptLaunch
from pytest_llmperf.launch.slurm.cluster import node_name, switch
from pytest_llmperf.launch.slurm.node_servers import Offer
from pytest_llmperf.launch.watch import HealthWatch, ProgressReader
from pytest_llmperf.support.channel import Channel, ChannelClosedError, Message
from pytest_llmperf.support.files import write_text

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


def serve(arguments: Sequence[str]) -> None:
    """Be this node's server; see above."""
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


TIMED_OUT = 124
_ENDED_BY_SIGNAL = 143
# Imports on the first node of a night take minutes; the server itself gives up before.
_FORK_SECONDS = 330.0


class _SignalledError(Exception):
    """Somebody ends this step: scancel, preemption, the time limit, or the launcher."""


def run_part(arguments: Sequence[str]) -> int:
    """Run this node's part; the exit code is torchrun's, or says that the time was over or the folder not writable."""
    folder, seconds, at = Path(arguments[0]), float(arguments[1]), [*arguments].index("--")
    name = node_name()
    signal.signal(signal.SIGTERM, _on_signal)
    if not _left(folder / f"node-{name}.json", {"node": name, "host": platform.node(), "switch": switch()}):
        return UNWRITABLE
    command = [word.replace("@node@", name) for word in arguments[at + 1 :]]
    with scratch(of_job=True) as place:
        environment, script = {**os.environ, **place.variables}, ScriptLaunch.left_in(folder)
        environment = script.environment(environment) if script else environment
        part = _Part(folder, name, command, environment, find_machine().gpus, script)
        ended = _run(part, Offer.from_words(arguments[2:at]), seconds)
        place.is_whole = ended["returncode"] == 0
    return int(ended["returncode"]) if _left(folder / f"node-{name}.end.json", ended) else UNWRITABLE


def _left(path: Path, word: Mapping[str, Any]) -> bool:
    """Whether this word could be left for the launcher; why not is told to srun."""
    try:
        write_text(path, json.dumps(word), lasts=False)
    except OSError as error:
        sys.stderr.write(f"llmperf: {error}\n")
        return False
    return True


@dataclass(frozen=True)
class _Part:
    """What this node does of a launch."""

    folder: Path
    node: str
    command: Sequence[str]
    environment: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    script: ScriptLaunch | None

    @property
    def log(self) -> Path:
        return self.folder / f"torchrun-{self.node}.log"


def _run(part: _Part, offer: Offer | None, seconds: float) -> dict[str, Any]:
    start = time.monotonic()
    progress = ProgressReader(part.folder / "progress.json", lambda _: None)
    answer: dict[str, Any] = {"returncode": _ENDED_BY_SIGNAL, "timed_out": False, "signalled": False}
    with HealthWatch(part.gpus, part.folder) as watched:
        try:
            agent, how, server = _forked(part, offer, seconds)
            answer |= how
            if agent is None and offer is not None and offer.is_required:
                why = f"--perf-start warm: it can only begin cold: on node {part.node}: {how['cold_because']}"
                answer |= {"returncode": 1, "error": why}
            else:
                script, left = part.script, seconds - (time.monotonic() - start)
                where, begin = script.work if script else None, process.start
                asks = {"at_timeout": lambda torchrun: process.ask_ranks(part.folder, torchrun, part.node)}
                ended = process.watch(
                    lambda: agent or begin(part.command, environment=part.environment, log=part.log, folder=where),
                    timeout_seconds=left,
                    poll=lambda: watched.look(progress.poll()),
                    **(script.ends(left, progress, part.node) if script else asks),
                )
                ended = script.closed(ended, part.gpus) if script else ended
                # A signal's number is none that an exit code can hold.
                answer["returncode"] = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
                answer["lost_server"] = agent is not None and agent.lost_server
                if answer["lost_server"] and server:
                    process.kill_with_children(server)  # it may live, and not run
                if ended.timed_out:
                    answer |= {"returncode": TIMED_OUT, "timed_out": True}
        except _SignalledError:
            answer |= {"signalled": True}
        except OSError as error:
            answer |= {"returncode": 127, "error": f"{part.command[0]}: {error}"}
        watched.look(progress.read())
        health = asdict(watched.health())
    return {**answer, "node": part.node, "seconds": time.monotonic() - start, "health": health}


def _forked(
    part: _Part, offer: Offer | None, seconds: float
) -> tuple[ForkedAgent | None, dict[str, Any], psutil.Process | None]:
    """This node's torchrun, begun warm within so many seconds, or ``None``; how it begins; its server."""
    if offer is None:
        return None, {"start": "cold"}, None
    server: psutil.Process | None = None
    try:
        channel, server = connected(f"{offer.name}-{part.node}")
        # By their names of everywhere: the server's step may number them otherwise.
        order = LaunchOrder(
            torchrun=part.command[BEFORE_WORDS:],
            environment={**part.environment, **shown(part.gpus)},
            needs=offer.needs,
            log=part.log,
        )
        use = {
            "python": part.command[0],
            "on_gpu": bool(part.gpus),
            "folder": os.getcwd(),  # noqa: PTH109 - a string is wanted
            "homes": [process.package_path(), str(part.folder / process.OTHER_PATH)],
            "processes": process_namespace(),
        }
        agent = Conversation(channel).launch(order, min(_FORK_SECONDS, seconds / 2), lambda: None, use)
    except ColdStartError as error:
        if isinstance(error, NoAnswerError) and server:
            process.kill_with_children(server)
        is_gone = isinstance(error, LostServerError)
        return None, {"start": "cold", "cold_because": str(error), "is_server_gone": is_gone}, None
    return agent, {"start": "warm"}, server


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM repeats itself, and the reaping must come to its end
    raise _SignalledError


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "server":
        serve(words)
    else:
        sys.exit(run_part(words))
