"""Fork servers as the launcher has them: started, told what to import, asked for launches, and ended; one run's are a
pool, which knows which of them a launch may begin from, and why there is none.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pytest_llmperf.launch.device import ASK_WITHOUT_A_CONTEXT, NO_GPU, VISIBLE
from pytest_llmperf.launch.forked_agent import ColdStartError, Conversation, ForkedAgent, LaunchOrder, NoAnswerError
from pytest_llmperf.launch.process import home_of_package, kill_with_children, python_path
from pytest_llmperf.settings.registry import packages
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.channel import Channel

Say = Callable[[str], None]

# Imports on the first node of a night, from a shared file system, take minutes.
_IMPORT_SECONDS = 300.0
# A fork takes milliseconds; the machine may be busy.
_FORK_SECONDS = 30.0
_LOOK_SECONDS = 0.5
# It ends the agents that it has, which have what torchrun gives its ranks.
_END_SECONDS = 80.0
_LAST_SECONDS = 5.0
# Needs of specs whose servers are kept: a fork each, of which only what it imported itself takes memory.
_MOST_BRANCHES = 4
# Each holds 0.6 GB; two are what a comparison of two environments needs.
_MOST_SERVERS = 2
# What a launch sets for itself, and ranks look at when they need it: none of it is read by an import.
_LIVE = frozenset({VISIBLE, "LLMPERF_LAUNCHER_BOOT", "LLMPERF_INJECT", "PYTEST_CURRENT_TEST"})
# For imports alone. OpenBLAS begins its threads while it is loaded, and so does the jemalloc inside of pyarrow, which
# the Trainer imports where datasets is installed; and torch must ask no GPU.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


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
        ours, its = socket.socketpair()
        try:
            with its, log.open("ab") as output:
                # The kernel tells of the end of a thread: only the main one lasts as long as this process.
                parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
                self._process = subprocess.Popen(
                    [python, "-m", "pytest_llmperf.worker.warm.fork_server", str(its.fileno()), str(parent)],
                    env=dict(environment),
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[its.fileno()],
                    start_new_session=True,  # a Ctrl-C at the terminal reaches us alone
                )
        except OSError:
            ours.close()
            raise
        self._base = Conversation(Channel(ours))
        self.pid = self._process.pid

    @property
    def is_stale(self) -> bool:
        """Whether a file that it has imported, or a package that is installed, is another now; its log says which."""
        talks = (self._base, *self._branches.values())
        for path, then in (known for talk in talks for known in talk.sources.items()):
            try:
                now: int | None = Path(path).stat().st_mtime_ns
            except OSError:
                now = None
            if now != then:
                with suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                    log.write(f"llmperf: {path} has changed since; another fork server takes this one's place\n")
                return True
        return False

    def launch(self, order: LaunchOrder, waiting: Callable[[], object]) -> ForkedAgent:
        """A torchrun, forked by it; ``waiting`` is called while it imports. ColdStartError; OSError of its log."""
        try:
            talk = self._branch(tuple(order.needs), self._unless_stopped(waiting))
            try:
                return talk.launch(order, _FORK_SECONDS, waiting)
            except NoAnswerError:  # stopped, it would begin the launch when it goes on, beside another
                self._kill()
                self.end()
                raise
        except (ColdStartError, OSError):
            raise
        except BaseException:  # Ctrl-C, a test's own time limit
            self.end()  # it may have begun what nobody would know of
            raise

    def _branch(self, needs: tuple[str, ...], waiting: Callable[[], object]) -> Conversation:
        if needs in self._refused:
            raise ColdStartError(self._refused[needs])
        if not self.is_ready:
            self._base.imported(_IMPORT_SECONDS, waiting)
            self.is_ready = True
        talk = self._branches.pop(needs, None)
        if talk is None:
            ours, its = socket.socketpair()
            talk = Conversation(Channel(ours))
            with its:
                self._base.send({"do": "branch", "needs": list(needs)}, [its.fileno()])
            try:
                talk.imported(_IMPORT_SECONDS, waiting)
            except ColdStartError as error:
                talk.channel.close()
                self._refused[needs] = str(error)
                raise
        self._branches[needs] = talk  # the last is the one that was used last
        while len(self._branches) > _MOST_BRANCHES:
            self._branches.pop(next(iter(self._branches))).channel.close()
        return talk

    def _unless_stopped(self, waiting: Callable[[], object]) -> Callable[[], None]:
        """``waiting``, but not for minutes, which imports have, for a server that was stopped: that is ended."""
        begun = looked = time.monotonic()

        def look() -> None:
            nonlocal begun, looked
            waiting()
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked, begun = now, begun if self._is_stopped() else now
                if now - begun > _FORK_SECONDS:
                    self.end()
                    raise ColdStartError(f"its fork server was stopped for more than {_FORK_SECONDS:.0f} s")

        return look

    def _is_stopped(self) -> bool:
        """Whether it lives and does not run, or one that it has forked."""
        try:
            server = psutil.Process(self.pid)
            every = [server, *server.children(recursive=True)]
            return any(process.status() == psutil.STATUS_STOPPED for process in every)
        except psutil.Error:
            return False

    def end(self) -> None:
        """End it and all that it has forked."""
        self.is_over = True
        if self._is_stopped():  # it would not listen
            self._kill()
        talks = (*self._branches.values(), self._base)
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

    def __init__(self, folder: Callable[[], Path], marks: Mapping[str, str] | None = None) -> None:
        """``folder``, made when the first server starts, is where they may leave logs; by the variables ``marks``
        others tell whose processes they are."""
        self._folder, self._marks = folder, marks or {}
        self._servers: dict[ServerKey, ServerProcess] = {}
        self._cold: dict[ServerKey, str] = {}
        self._num_started = 0
        self._is_closed = False

    def prepare(self, key: ServerKey) -> None:
        """Let a server begin its imports; why it cannot is told to the launch that wants it."""
        with suppress(ColdStartError):
            self._server(key)

    def launch(self, key: ServerKey, order: LaunchOrder, waiting: Callable[[], object]) -> ForkedAgent:
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
            if key.on_gpu:
                visible = os.environ.get(VISIBLE)
                environment |= ASK_WITHOUT_A_CONTEXT if visible is None else {VISIBLE: visible, **ASK_WITHOUT_A_CONTEXT}
            else:
                environment |= NO_GPU
            return ServerProcess(key.python, environment, key.folder, home / "server.log")
        except OSError as error:
            self._cold[key] = f"no fork server could be started ({error})"
            raise ColdStartError(self._cold[key]) from None


@dataclass(frozen=True)
class WarmStart:
    """From where a launch may begin warm, and what becomes of one that cannot."""

    servers: ServerPool | None
    """This machine's; ``None`` where a site has others on its nodes."""
    say: Say
    """Told why a launch begins cold, once for each reason."""
    is_required: bool = False
    """Whether a launch that cannot begin warm fails."""
    said: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def asked(cls, start: str, servers: ServerPool | None, say: Say, said: set[str]) -> WarmStart | None:
        """As ``--perf-start`` says; ``None`` where launches begin cold."""
        return None if start == "cold" else cls(servers, say, is_required=start == "warm", said=said)

    def agent(self, key: ServerKey, order: LaunchOrder, waiting: Callable[[], object]) -> ForkedAgent | None:
        """This machine's torchrun, begun warm; ``None`` where it has to begin cold. Raises as ``cold``, and OSError."""
        try:
            return None if self.servers is None else self.servers.launch(key, order, waiting)
        except ColdStartError as error:
            self.cold(str(error))
            return None

    def cold(self, why: str) -> None:
        """Say why a launch has to begin cold; ColdStartError where it must not."""
        if self.is_required:
            raise ColdStartError(f"--perf-start warm: it can only begin cold: {why}")
        self.tell(why)

    def tell(self, why: str) -> None:
        """Say why a launch begins cold."""
        if why not in self.said:
            self.said.add(why)
            self.say(f"launches begin cold: {why}")
