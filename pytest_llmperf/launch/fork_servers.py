"""Fork servers as the launcher has them: started, told what to import, asked for launches, ended; and a run's pool."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from pytest_llmperf.launch.device import ASK_WITHOUT_A_CONTEXT, NO_GPU, VISIBLE
from pytest_llmperf.launch.process import home_of_package, is_alive, kill_with_children, python_path, start
from pytest_llmperf.settings.registry import packages
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.interpreter import Channel, ChannelClosedError, Message

_POLL_SECONDS = 0.1
# Imports on the first node of a night, from a shared file system, take minutes.
_IMPORT_SECONDS = 300.0
# A fork takes milliseconds; the machine may be busy.
_FORK_SECONDS = 30.0
# Whoever forked an agent reaps it, and tells at once.
_REAP_SECONDS = 30.0
# A server ends the agents that it has, which have what torchrun gives its ranks.
_END_SECONDS, _LAST_SECONDS = 80.0, 5.0
# Needs of specs whose servers are kept: a fork each, of which only what it imported itself takes memory. Of servers
# each holds 0.6 GB; two are what a comparison of two environments needs.
_MOST_BRANCHES, _MOST_SERVERS = 4, 2
# What a launch sets for itself, and ranks look at when they need it: none of it is read by an import.
_LIVE = frozenset({VISIBLE, "LLMPERF_LAUNCHER_BOOT", "LLMPERF_INJECT", "PYTEST_CURRENT_TEST"})
# For imports alone: OpenBLAS and pyarrow's jemalloc begin threads while they are loaded; torch must ask no GPU.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

_DIED = "its fork server died"

#: Called again and again while somebody waits.
Waiting: TypeAlias = Callable[[], object]


class ColdStartError(Exception):
    """Why a launch cannot begin warm."""


class LostServerError(ColdStartError):
    """Its server is gone: another may."""


class NoAnswerError(LostServerError):
    """Whoever was asked has said nothing for too long; it may still do what it was asked for."""


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    torchrun: Sequence[str]
    """Its options and what it starts, as after ``torchrun`` in a shell."""
    environment: Mapping[str, str]
    """All of it, as torchrun and its ranks are to have it."""
    needs: Sequence[str]
    """What its spec makes a rank import beyond what all import: ``family:llama``, ``liger``, …"""
    log: Path


class Conversation:
    """With one process that imports, and then forks launches: a fork server, or a node's of a SLURM job."""

    def __init__(self, end: socket.socket) -> None:
        self.channel = Channel(end)
        self.is_lost = False
        self.sources: Mapping[str, int] = {}
        """The files that it has imported, and when each was changed last."""
        self._returncodes: dict[int, int] = {}

    def returncode(self, pid: int) -> int | None:
        while self.listen(0):
            pass
        return self._returncodes.get(pid)

    def listen(self, timeout: float) -> Message | None:
        """The next message; ``None`` where none came. What it tells of agents is noted."""
        if self.is_lost:
            time.sleep(timeout)
            return None
        try:
            message = self.channel.receive(timeout)
        except ChannelClosedError:
            self.is_lost = True
            return None
        if message is not None and "ended" in message.content:
            self._returncodes[message.content["ended"]] = message.content["returncode"]
        return message

    def send(self, content: dict[str, Any], files: Sequence[int] = ()) -> None:
        """See ``Channel.send``; LostServerError where it is gone."""
        try:
            self.channel.send(content, files)
        except ChannelClosedError:
            raise LostServerError(_DIED) from None

    def imported(self, waiting: Waiting) -> None:
        """Wait until it has imported what it was told to; ColdStartError where it cannot fork launches."""
        self.sources = self._answer(_IMPORT_SECONDS, waiting, "imported")["ready"]

    def launch(
        self, order: LaunchOrder, waiting: Waiting, seconds: float, more: Mapping[str, Any] | None = None
    ) -> ForkedAgent:
        """A torchrun, forked within ``seconds``; ``more``: for a node's server. ColdStartError; OSError of its log."""
        words = {"torchrun": [*order.torchrun], "environment": dict(order.environment), "needs": [*order.needs]}
        with order.log.open("wb") as log:
            self.send({"do": "launch", **words, **(more or {})}, [log.fileno()])
        return ForkedAgent(self._answer(seconds, waiting, "forked")["began"], self)

    def _answer(self, seconds: float, waiting: Waiting, what: str) -> dict[str, Any]:
        """What it says next, within so many ``seconds``; ColdStartError where it refuses, or is gone, or is silent."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            message = self.listen(_POLL_SECONDS)
            if self.is_lost:
                raise LostServerError(_DIED)
            content = {} if message is None else message.content
            if "refused" in content:
                raise ColdStartError(content["refused"])
            if content and "ended" not in content:
                return content
            waiting()
        # What it says later must be nobody's answer, and what it begins later nobody's launch.
        self.channel.close()
        self.is_lost = True
        raise NoAnswerError(f"its fork server {what} for more than {seconds:.0f} s")


class ForkedAgent:
    """torchrun's agent, forked by a server that reaps it and tells its end. A ``Started``."""

    def __init__(self, pid: int, server: Conversation) -> None:
        self.pid, self._server = pid, server
        self.is_lost = False
        """It has ended, and whoever was to tell how is gone, or was stopped."""
        self._returncode: int | None = None
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):  # it may have ended already
            self._process = psutil.Process(pid)
        self._gone_at = math.inf

    def poll(self) -> int | None:
        """See ``Started``; of one that is lost, whose agents get SIGTERM by the kernel: SIGTERM's."""
        if self._returncode is not None:
            return self._returncode
        self._returncode = self._server.returncode(self.pid)
        if self._returncode is None and not (self._process and is_alive(self._process)):
            self._gone_at = min(self._gone_at, time.monotonic())
            if self._server.is_lost or time.monotonic() - self._gone_at > _REAP_SECONDS:
                self.is_lost, self._returncode = True, -signal.SIGTERM
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (returncode := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
            self._server.listen(min(left, _POLL_SECONDS))
        return returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None and self._process is not None:
            with suppress(psutil.Error):
                self._process.send_signal(number)  # not if the pid was given anew


class ServerProcess:
    """One interpreter in one environment."""

    def __init__(self, python: str, environment: Mapping[str, str], folder: str, log: Path) -> None:
        """Start it; its imports take seconds, and nobody waits for them here. OSError where it cannot be started."""
        self._log = log
        self._branches: dict[tuple[str, ...], Conversation] = {}
        self._refused: dict[tuple[str, ...], str] = {}
        self.is_ready = False
        """Whether it has imported what every rank does, and can fork."""
        self.is_over = False
        # The kernel tells of the end of a thread: only the main one lasts as long as this process.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        ours, its = socket.socketpair()
        try:
            with its:
                end = its.fileno()
                command = [python, "-m", "pytest_llmperf.worker.warm.fork_server", str(end), str(parent)]
                self._process = start(command, environment=environment, log=log, folder=folder, pass_fds=[end])
        except OSError:
            ours.close()
            raise
        self._base, self.pid = Conversation(ours), self._process.pid

    @property
    def is_stale(self) -> bool:
        """Whether a file that it has imported, or a package that is installed, is another now; its log says which."""
        for path, then in (known for talk in self._talks for known in talk.sources.items()):
            try:
                now: int | None = Path(path).stat().st_mtime_ns
            except OSError:
                now = None
            if now != then:
                with suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                    log.write(f"llmperf: {path} has changed since; another fork server takes this one's place\n")
                return True
        return False

    @property
    def _talks(self) -> list[Conversation]:
        return [*self._branches.values(), self._base]

    def launch(self, order: LaunchOrder, waiting: Waiting) -> ForkedAgent:
        """A torchrun, forked by it; ``waiting`` is called while it imports. ColdStartError; OSError of its log."""
        try:
            talk = self._branch(tuple(order.needs), waiting)
            try:
                return talk.launch(order, waiting, _FORK_SECONDS)
            except NoAnswerError:  # stopped, it would begin the launch when it goes on, beside another
                self._kill()
                self.end()
                raise
        except (ColdStartError, OSError):
            raise
        except BaseException:  # Ctrl-C, a test's own time limit
            self.end()  # it may have begun what nobody would know of
            raise

    def _branch(self, needs: tuple[str, ...], waiting: Waiting) -> Conversation:
        """With its fork that has imported these."""
        if needs in self._refused:
            raise ColdStartError(self._refused[needs])
        if not self.is_ready:
            self._base.imported(waiting)
            self.is_ready = True
        if (talk := self._branches.pop(needs, None)) is None:
            ours, its = socket.socketpair()
            talk = Conversation(ours)
            with its:
                self._base.send({"do": "branch", "needs": [*needs]}, [its.fileno()])
            try:
                talk.imported(waiting)
            except ColdStartError as error:
                talk.channel.close()
                self._refused[needs] = str(error)
                raise
        self._branches[needs] = talk  # the last is the one that was used last
        while len(self._branches) > _MOST_BRANCHES:
            self._branches.pop(next(iter(self._branches))).channel.close()
        return talk

    def end(self) -> None:
        """End it and all that it has forked."""
        self.is_over = True
        talks = self._talks
        for talk in talks:
            talk.channel.say_no_more()
        if not self.is_ready:
            self._process.terminate()  # it looks at no channel while it imports
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        for talk in talks:  # a branch outlives a server that was killed by as long as its agents take to end
            talk.channel.wait_for_end(_LAST_SECONDS)
            talk.channel.close()
            talk.is_lost = True

    def _kill(self) -> None:
        with suppress(psutil.Error):
            kill_with_children(psutil.Process(self.pid))


def needs(spec: TrainSpec) -> tuple[str, ...]:
    """What ``spec`` makes a rank import beyond what all import."""
    wanted = (package.preload for package in packages(spec) if package.preload)
    return (f"family:{spec.architecture.config['model_type']}", *wanted)


@dataclass(frozen=True)
class ServerKey:
    """What a process is made of from its start on: nothing of it can change later."""

    python: str
    environment: frozenset[tuple[str, str]]
    folder: str
    """In which it starts: the first place where ``python -m`` looks for modules."""
    on_gpu: bool

    @classmethod
    def for_rank(cls, python: str, environment: Mapping[str, str], folder: str, *, on_gpu: bool) -> ServerKey:
        """For a rank with this ``environment``, which names no folder of a single launch, and ``folder``."""
        lasting = frozenset((name, value) for name, value in environment.items() if name not in _LIVE)
        return cls(python, lasting, folder, on_gpu)


class ServerPool:
    """Starts servers, keeps the ones that were used last, and ends them all."""

    def __init__(
        self, folder: Callable[[], Path], marks: Mapping[str, str] | None = None, before_end: Waiting = lambda: None
    ) -> None:
        """``folder``, made when the first server starts, is for their logs; by the variables ``marks`` others tell
        whose processes they are. ``before_end`` waits for a launch of one that another takes the place of."""
        self._folder, self._marks, self._before_end = folder, marks or {}, before_end
        self._servers: dict[ServerKey, ServerProcess] = {}
        self._cold: dict[ServerKey, str] = {}
        self._num_started = 0
        self._is_closed = False

    def prepare(self, key: ServerKey) -> None:
        """Let a server begin its imports; why it cannot is told to the launch that wants it."""
        with suppress(ColdStartError):
            self._server(key)

    def launch(self, key: ServerKey, order: LaunchOrder, waiting: Waiting) -> ForkedAgent:
        """A torchrun, forked by the server of ``key``; see ``ServerProcess.launch``."""
        server = self._server(key)
        try:
            return server.launch(order, waiting)
        except ColdStartError as error:
            if server.is_over or not server.is_ready:  # it never will be
                self._cold[key] = str(error)
                self._servers.pop(key).end()
            raise

    def close(self) -> None:
        """End them all; what is launched later begins cold."""
        self._is_closed = True
        while self._servers:
            self._servers.popitem()[1].end()

    def _server(self, key: ServerKey) -> ServerProcess:
        if self._is_closed:
            raise ColdStartError("the run is at its end")
        if key in self._cold:
            raise ColdStartError(self._cold[key])
        server = self._servers.pop(key, None)
        if server is not None and (server.is_over or server.is_stale):
            self._before_end()
            server.end()
            server = None
        self._servers[key] = server or self._started(key)  # the last is the one that was used last
        while len(self._servers) > _MOST_SERVERS:
            self._servers.pop(next(iter(self._servers))).end()
        return self._servers[key]

    def _started(self, key: ServerKey) -> ServerProcess:
        self._num_started += 1
        try:
            home = self._folder() / f"fork-server-{self._num_started}"
            home.mkdir()
            environment = {**self._marks, **dict(key.environment), **_WHILE_IMPORTING}
            environment |= python_path(home_of_package(key.python, home), environment)
            visible = {VISIBLE: os.environ[VISIBLE]} if VISIBLE in os.environ else {}
            environment |= {**visible, **ASK_WITHOUT_A_CONTEXT} if key.on_gpu else NO_GPU
            return ServerProcess(key.python, environment, key.folder, home / "server.log")
        except OSError as error:
            self._cold[key] = f"no fork server could be started ({error})"
            raise ColdStartError(self._cold[key]) from None
