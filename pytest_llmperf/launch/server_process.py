"""The fork server as the launcher has it: started, told what to import, asked for launches, and ended."""

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

from pytest_llmperf.launch.forked_agent import (
    ColdStartError,
    Conversation,
    ForkedAgent,
    LaunchOrder,
    NoAnswerError,
    StoppedServerError,
    kill_with_children,
)
from pytest_llmperf.support.channel import Channel

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


class _Branch(Conversation):
    """With one process that imports, and then forks."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.sources: Mapping[str, int] = {}

    def imported(self, waiting: Callable[[], object]) -> None:
        """Wait until it has imported what it was told to.

        Raises:
            ColdStartError: it cannot fork launches.
        """
        self.sources = self.answer(_IMPORT_SECONDS, waiting, "imported").content["ready"]


@dataclass
class ServerProcess:
    """One interpreter in one environment."""

    python: str
    environment: Mapping[str, str]
    folder: str
    log: Path
    _process: subprocess.Popen[bytes] = field(init=False)
    _base: _Branch = field(init=False)
    _branches: dict[tuple[str, ...], _Branch] = field(init=False, default_factory=dict)
    _refused: dict[tuple[str, ...], str] = field(init=False, default_factory=dict)
    is_ready: bool = field(init=False, default=False)
    """Whether it has imported what every rank does, and can fork."""
    is_over: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Start it; its imports take seconds, and nobody waits for them here.

        Raises:
            OSError: it cannot be started.
        """
        ours, its = socket.socketpair()
        try:
            with its, self.log.open("ab") as output:
                # The kernel tells of the end of a thread: only the main one lasts as long as this process.
                parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
                self._process = subprocess.Popen(
                    [self.python, "-m", "pytest_llmperf.worker.warm.fork_server", str(its.fileno()), str(parent)],
                    env=dict(self.environment),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[its.fileno()],
                    start_new_session=True,  # a Ctrl-C at the terminal reaches us alone
                )
        except OSError:
            ours.close()
            raise
        self._base = _Branch(Channel(ours))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stale(self) -> bool:
        """Whether a file that it has imported, or a package that is installed, is another now; its log says which."""
        talks = (self._base, *self._branches.values())
        changed = (path for talk in talks for path, then in talk.sources.items() if _changed_at(path) != then)
        path = next(changed, None)
        if path is not None:
            with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
                log.write(f"llmperf: {path} has changed since; another fork server takes this one's place\n")
        return path is not None

    def launch(self, order: LaunchOrder, waiting: Callable[[], object]) -> ForkedAgent:
        """A torchrun, forked by it; ``waiting`` is called while it still imports.

        Raises:
            ColdStartError: it cannot.
            OSError: the log cannot be written.
        """
        try:
            try:
                talk = self._branch(tuple(order.needs), self._unless_stopped(waiting))
            except StoppedServerError:
                self.end()
                raise
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

    def _branch(self, needs: tuple[str, ...], waiting: Callable[[], object]) -> _Branch:
        if needs in self._refused:
            raise ColdStartError(self._refused[needs])
        if not self.is_ready:
            self._base.imported(waiting)
            self.is_ready = True
        talk = self._branches.pop(needs, None)
        if talk is None:
            ours, its = socket.socketpair()
            talk = _Branch(Channel(ours))
            with its:
                self._base.send({"do": "branch", "needs": list(needs)}, [its.fileno()])
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

    def _unless_stopped(self, waiting: Callable[[], object]) -> Callable[[], None]:
        """``waiting``, but not for minutes, which imports have, for a server that was stopped."""
        begun = looked = time.monotonic()

        def look() -> None:
            nonlocal begun, looked
            waiting()
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked, begun = now, begun if self._is_stopped else now
                if now - begun > _FORK_SECONDS:
                    raise StoppedServerError(f"its fork server was stopped for more than {_FORK_SECONDS:.0f} s")

        return look

    @property
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
        if self._is_stopped:  # it would not listen
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


def _changed_at(path: str) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None
