"""The fork server as the launcher has it: started, told what to import, asked for launches, and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pytest_llmperf.support.channel import Channel, ChannelClosedError, Message

# Imports on the first node of a night, from a shared file system, take minutes.
_IMPORT_SECONDS = 300.0
# A fork takes milliseconds; the machine may be busy.
_FORK_SECONDS = 30.0
# It ends the agents that it has, which have what torchrun gives its ranks.
_END_SECONDS = 80.0
_LAST_SECONDS = 5.0
_POLL_SECONDS = 0.1

# Needs of specs whose servers are kept: a fork each, of which only what it imported itself takes memory.
_MOST_BRANCHES = 4


_DIED = "its fork server died"


class ColdStartError(Exception):
    """Why a launch cannot begin warm."""


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """What is to be launched."""

    folder: Path
    num_ranks: int
    environment: Mapping[str, str]
    """All of it, as torchrun and its ranks are to have it."""
    needs: tuple[str, ...]
    """What its spec makes a rank import beyond what all import: ``family:llama``, ``liger``, …"""
    log: Path


class ForkedAgent:
    """torchrun's agent, forked by a server that reaps it and tells its end. A ``Started``."""

    def __init__(self, pid: int, told: _Talk) -> None:
        self.pid, self._told = pid, told
        self._returncode: int | None = None
        self._process = _process(pid)

    @property
    def lost_server(self) -> bool:
        """Whether the server is gone, so that how this ended is not known."""
        return self._told.is_lost

    def poll(self) -> int | None:
        """See ``Started``; of a server that is gone, whose agents get SIGTERM by the kernel: SIGTERM's."""
        if self._returncode is None:
            self._returncode = self._told.returncode(self.pid)
        if self._returncode is None and self._told.is_lost and not self._is_alive():
            self._returncode = -signal.SIGTERM
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """See ``Started``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (returncode := self.poll()) is None:
            left = _POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
            self._told.listen(min(left, _POLL_SECONDS))
        return returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None and self._process is not None:
            with suppress(psutil.Error):
                self._process.send_signal(number)  # not if the pid was given anew

    def _is_alive(self) -> bool:
        if self._process is None:
            return False
        try:
            return bool(self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False


class _Talk:
    """A conversation with one server process."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.is_lost = False
        self.sources: Mapping[str, int] = {}
        self._returncodes: dict[int, int] = {}

    def returncode(self, pid: int) -> int | None:
        """Of an agent that has ended."""
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

    def answer(self, seconds: float, waiting: Callable[[], object], what: str) -> Message:
        """What it says next, for which it has so many ``seconds``; ``waiting`` is called meanwhile.

        Raises:
            ColdStartError: it refuses, is gone, or takes too long.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            message = self.listen(_POLL_SECONDS)
            if self.is_lost:
                raise ColdStartError(_DIED)
            if message is not None and "refused" in message.content:
                raise ColdStartError(message.content["refused"])
            if message is not None and "ended" not in message.content:
                return message
            waiting()
        raise ColdStartError(f"its fork server {what} for more than {seconds:.0f} s")

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
    log: Path
    _process: subprocess.Popen[bytes] = field(init=False)
    _base: _Talk = field(init=False)
    _branches: dict[tuple[str, ...], _Talk] = field(init=False, default_factory=dict)
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
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[its.fileno()],
                    start_new_session=True,  # a Ctrl-C at the terminal reaches us alone
                )
        except OSError:
            ours.close()
            raise
        self._base = _Talk(Channel(ours))

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
            talk = self._branch(order.needs, waiting)
            with order.log.open("wb") as log:
                asked = {"do": "launch", "folder": str(order.folder), "ranks": order.num_ranks}
                talk.channel.send({**asked, "environment": dict(order.environment)}, [log.fileno()])
            return ForkedAgent(talk.answer(_FORK_SECONDS, waiting, "forked").content["began"], talk)
        except ChannelClosedError:
            raise ColdStartError(_DIED) from None
        except (ColdStartError, OSError):
            raise
        except BaseException:  # Ctrl-C, a test's own time limit
            self.end()  # it may have begun what nobody would know of
            raise

    def _branch(self, needs: tuple[str, ...], waiting: Callable[[], object]) -> _Talk:
        if needs in self._refused:
            raise ColdStartError(self._refused[needs])
        if not self.is_ready:
            self._base.imported(waiting)
            self.is_ready = True
        talk = self._branches.pop(needs, None)
        if talk is None:
            ours, its = socket.socketpair()
            talk = _Talk(Channel(ours))
            with its:
                self._base.channel.send({"do": "branch", "needs": list(needs)}, [its.fileno()])
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
        talks = (*self._branches.values(), self._base)
        for talk in talks:
            talk.channel.say_no_more()
        if not self.is_ready:
            self._process.terminate()  # it looks at no channel while it imports
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for talk in talks:  # a branch outlives a server that was killed by as long as its agents take to end
            talk.channel.wait_for_end(_LAST_SECONDS)
            talk.channel.close()
            talk.is_lost = True


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:  # it has ended already
        return None


def _changed_at(path: str) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None
