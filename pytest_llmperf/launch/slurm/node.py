"""A node's two processes, both started by srun.

``python -m …node server NAME FOLDER cpu|gpu PYTHON``, for the whole run: the node's fork servers. Agents find it by
NAME and ask it as the pytest process asks its own servers on one machine: what it forks is torchrun's agent, with the
environment of the launch's own step. It ends when its standard input does, that is with the pytest process.

``python -m …node agent FOLDER SECONDS [OFFER] -- COMMAND``, for one launch: it runs torchrun on its node (COMMAND, or a
fork of the server that OFFER names), watches the node's GPUs, keeps what a hanging rank was doing, reaps, and leaves in
the shared folder that it began (``node-NAME.json``) and how it ended (``node-NAME.end.json``). A node that left the
first and not the second is one that failed."""

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from pytest_llmperf.launch import fork_servers, process
from pytest_llmperf.launch.device import OF_A_STEP, RECORD, shown
from pytest_llmperf.launch.fork_servers import ColdStartError, ForkedAgent, LaunchOrder, ServerKey, ServerPool
from pytest_llmperf.launch.local import HostPart
from pytest_llmperf.launch.machine import find_machine
from pytest_llmperf.launch.request import BEFORE_WORDS
from pytest_llmperf.launch.scratch import UNWRITABLE, scratch
from pytest_llmperf.launch.script import ScriptLaunch
from pytest_llmperf.launch.slurm.cluster import node_name, switch
from pytest_llmperf.launch.watch import HealthWatch, ProgressReader
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.interpreter import Channel, ChannelClosedError, Message

# Source: unix(7), SO_PEERCRED: process, user and group.
_CREDENTIALS = struct.Struct("3i")
# A SIGTERM waits for no longer until it is looked at.
_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.05
# Whoever connects asks at once; the node may be busy.
_ASK_SECONDS = 30.0
# Of a step, a node or a launch; what a spec sets is not among them.
_PASSING = ("SLURM", "SRUN_", "PMI", "TORCHELASTIC_")
# Compilers keep what they made below the step's TMPDIR.
_OF_A_LAUNCH = frozenset({"TMPDIR", RECORD, *OF_A_STEP, "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"})

_TIMED_OUT, _ENDED_BY_SIGNAL, _NOT_FOUND = 124, 143, 127
# Imports on the first node of a night take minutes; the server itself gives up before.
_FORK_SECONDS = 330.0


def server_key(
    python: str, environment: Mapping[str, str], homes: Sequence[str], folder: str, *, on_gpu: bool
) -> ServerKey:
    """Name the server for ranks in ``environment``, whose ``PYTHONPATH`` begins with one of ``homes``."""
    kept = (each for each in environment.items() if each[0] not in _OF_A_LAUNCH)
    lasting = {name: value for name, value in kept if not name.startswith(_PASSING)}
    path = [part for part in lasting.pop("PYTHONPATH", "").split(os.pathsep) if part and part not in homes]
    lasting |= {"PYTHONPATH": os.pathsep.join(path)} if path else {}
    return ServerKey.for_rank(python, lasting, folder, on_gpu=on_gpu)


def serve(name: str, folder: Path, device: str, word: str) -> None:
    """Be this node's server; ``word`` is how this interpreter is called on a command line."""
    node = node_name()
    with scratch(of_job=True) as place, socket.socket(socket.AF_UNIX) as listener:
        place.is_whole = True  # what launches compile, their agents see end
        listener.bind(f"\0{name}-{node}")
        listener.listen()
        (folder / node).mkdir(parents=True)
        # What is forked shows the environment of its server to whoever looks for a job's processes.
        marks = {name: value for name, value in os.environ.items() if name.startswith(_PASSING)}
        pool = ServerPool(lambda: folder / node, marks)
        try:
            environment = {**os.environ, **place.variables}
            here = os.getcwd()  # noqa: PTH109 - a string is wanted
            home = [process.package_path()]
            pool.prepare(server_key(sys.executable, environment, home, here, on_gpu=device == "gpu"))
            _serve_launches(listener, pool, word)
        finally:
            pool.close()


def _serve_launches(listener: socket.socket, pool: ServerPool, word: str) -> None:
    """One after the other, as the node is leased to one at a time, until the run is over or SLURM ends the step."""
    told_to_end: list[object] = []
    # SLURM tells every step of the job at once: the launch's own agent reaps it, and says why it ended.
    signal.signal(signal.SIGTERM, lambda *signal_: told_to_end.append(signal_))
    while not told_to_end and not _is_over():
        if listener not in select.select([listener, sys.stdin], [], [], _LOOK_SECONDS)[0]:
            continue
        with suppress(ChannelClosedError, OSError):  # an OSError: whoever has come is gone again
            end, _ = listener.accept()
            with end:
                channel, (_, user) = Channel(end), _credentials(end)
                asked = channel.receive(_ASK_SECONDS) if user == os.getuid() else None
                if asked is not None:
                    _serve_one(channel, asked, pool, word)


def _serve_one(channel: Channel, asked: Message, pool: ServerPool, word: str) -> None:
    agent = None
    try:
        agent = _forked(channel, asked, pool, word)
        channel.send({"began": agent.pid})
        while (returncode := agent.poll()) is None:
            _look(channel)
            with suppress(subprocess.TimeoutExpired):
                agent.wait(_POLL_SECONDS)
        if not agent.is_lost:  # else a closed channel says that how it ended is not known
            channel.send({"ended": agent.pid, "returncode": returncode})
    except ColdStartError as error:
        channel.send({"refused": str(error)})
    except OSError as error:
        channel.send({"refused": f"no fork server could be asked ({error})"})
    finally:
        for file in asked.files:
            os.close(file)
        if agent is not None:
            process.reap(agent, set)


def _forked(channel: Channel, asked: Message, pool: ServerPool, word: str) -> ForkedAgent:
    content = asked.content
    environment, folder = content["environment"], content["folder"]
    if content["processes"] != _process_namespace():
        raise ColdStartError("its container has processes of its own, and so has its fork server's")
    for path in (folder, environment.get("TMPDIR", folder), content["torchrun"][-1]):
        if not Path(path).is_dir():
            raise ColdStartError(f"its fork server sees no folder {path}, in a container of its own")
    log = Path(f"/proc/self/fd/{asked.files[0]}")
    order = LaunchOrder(torchrun=content["torchrun"], environment=environment, needs=content["needs"], log=log)
    # The word by which this process was started, too, is this interpreter.
    python = sys.executable if content["python"] == word else content["python"]
    key = server_key(python, environment, content["homes"], folder, on_gpu=content["on_gpu"])
    return pool.launch(key, order, lambda: _look(channel))


def _look(channel: Channel) -> None:
    """Raise ChannelClosedError where nobody waits any more: the launch's agent is gone, or the run."""
    channel.receive(0)
    if _is_over():
        raise ChannelClosedError("the run is over")


def _is_over() -> bool:
    """Whether the run is: its end of this process' standard input is closed, and nothing is ever written there."""
    return bool(select.select([sys.stdin], [], [], 0)[0]) and not os.read(sys.stdin.fileno(), 4096)


def _credentials(end: socket.socket) -> tuple[int, int]:
    pid, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def _process_namespace() -> str:
    """Within which a pid means one process: a container may have its own."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it points to nothing


class _SignalledError(Exception):
    """Somebody ends this step: scancel, preemption, the time limit, or the launcher."""


def run_part(folder: Path, seconds: float, offer: Sequence[str], command: Sequence[str]) -> int:
    """Run this node's part; the exit code is torchrun's, or says that the time was over or the folder not writable."""

    def on_signal(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM repeats itself, and the reaping must come to its end
        raise _SignalledError

    signal.signal(signal.SIGTERM, on_signal)
    name = node_name()
    if not _left(folder / f"node-{name}.json", {"node": name, "host": platform.node(), "switch": switch()}):
        return UNWRITABLE
    words = [word.replace("@node@", name) for word in command]
    with scratch(of_job=True) as place:
        environment, script = {**os.environ, **place.variables}, ScriptLaunch.left_in(folder)
        environment = script.environment(environment) if script else environment
        ended = _run(HostPart(folder, words, environment, find_machine().gpus, script, name), offer, seconds)
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


def _run(part: HostPart, offer: Sequence[str], seconds: float) -> dict[str, Any]:
    start = time.monotonic()
    progress = ProgressReader(part.folder / "progress.json", lambda _: None)
    answer: dict[str, Any] = {"returncode": _ENDED_BY_SIGNAL, "timed_out": False, "signalled": False, "start": "cold"}
    with HealthWatch(part.gpus, part.folder) as watched:
        try:
            agent, server, why_cold = _begun_warm(part, offer, seconds) if offer else (None, None, {})
            answer |= why_cold
            if why_cold and offer[0] == "warm":
                why = f"--perf-start warm: it can only begin cold: on node {part.node}: {why_cold['cold_because']}"
                answer |= {"returncode": 1, "error": why}
            else:
                ended = part.run(agent, seconds - (time.monotonic() - start), progress, watched)
                # A signal's number is none that an exit code can hold.
                answer["returncode"] = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
                if agent:
                    answer |= {"start": "warm", "lost_server": agent.is_lost}
                    if agent.is_lost and server:
                        process.kill_with_children(server)  # it may live, and not run
                answer |= {"soaked": True} if ended.is_soaked else {}
                if ended.timed_out:
                    answer |= {"returncode": _TIMED_OUT, "timed_out": True}
        except _SignalledError:
            answer["signalled"] = True
        except OSError as error:
            answer |= {"returncode": _NOT_FOUND, "error": f"{part.command[0]}: {error}"}
        watched.look(progress.read())
        health = asdict(watched.health())
    return {**answer, "node": part.node, "seconds": time.monotonic() - start, "health": health}


def _begun_warm(
    part: HostPart, offer: Sequence[str], seconds: float
) -> tuple[ForkedAgent | None, psutil.Process | None, dict[str, Any]]:
    """This node's torchrun, forked within so many seconds by its server, and that, if visible; else why it is cold."""
    _, name, *needs = offer
    server, end = None, socket.socket(socket.AF_UNIX)
    try:
        try:
            end.connect(f"\0{name}-{part.node}")
        except OSError as error:
            raise fork_servers.LostServerError(f"its fork server is gone ({error})") from None
        pid, user = _credentials(end)
        if user != os.getuid():
            raise ColdStartError("another user's process has the name of its fork server")
        server = psutil.Process(pid) if pid > 0 and psutil.pid_exists(pid) else None
        # GPUs by their names of everywhere: the server's step may number them otherwise.
        environment = {**part.environment, **shown(part.gpus)}
        torchrun = part.command[BEFORE_WORDS:]
        order = LaunchOrder(torchrun=torchrun, environment=environment, needs=needs, log=part.log)
        use = {
            "python": part.command[0],
            "on_gpu": bool(part.gpus),
            "folder": os.getcwd(),  # noqa: PTH109 - a string is wanted
            "homes": [process.package_path(), str(part.folder / process.OTHER_PATH)],
            "processes": _process_namespace(),
        }
        agent = fork_servers.Conversation(end).launch(order, lambda: None, min(_FORK_SECONDS, seconds / 2), use)
    except ColdStartError as error:
        end.close()
        if isinstance(error, fork_servers.NoAnswerError) and server:
            process.kill_with_children(server)
        is_gone = isinstance(error, fork_servers.LostServerError)
        return None, None, {"cold_because": str(error), "is_server_gone": is_gone}
    return agent, server, {}


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "server":
        serve(words[0], Path(words[1]), *words[2:])
    else:
        at = words.index("--")
        sys.exit(run_part(Path(words[0]), float(words[1]), words[2:at], words[at + 1 :]))
