"""A launch that was forked, and the conversation with whoever forked it: a fork server, or a node's of a SLURM job."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pytest_llmperf.support.channel import Channel, ChannelClosedError, Message

_POLL_SECONDS = 0.1

DIED = "its fork server died"


class ColdStartError(Exception):
    """Why a launch cannot begin warm."""


class NoAnswerError(ColdStartError):
    """Whoever was asked has said nothing for too long; it may still do what it was asked for."""


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """What is to be launched."""

    torchrun: Sequence[str]
    """Its options and what it starts, as after ``torchrun`` in a shell."""
    environment: Mapping[str, str]
    """All of it, as torchrun and its ranks are to have it."""
    needs: Sequence[str]
    """What its spec makes a rank import beyond what all import: ``family:llama``, ``liger``, …"""
    log: Path
    """Of torchrun."""


class Conversation:
    """With one process that forks launches."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.is_lost = False
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

    def send(self, content: dict[str, Any], files: Sequence[int] = ()) -> None:
        """See ``Channel.send``.

        Raises:
            ColdStartError: it is gone.
        """
        try:
            self.channel.send(content, files)
        except ChannelClosedError:
            raise ColdStartError(DIED) from None

    def launch(self, order: LaunchOrder, seconds: float, waiting: Callable[[], object]) -> ForkedAgent:
        """A torchrun, forked within so many ``seconds``.

        Raises:
            ColdStartError: there is none.
            OSError: its log cannot be written.
        """
        with order.log.open("wb") as log:
            told = {"torchrun": [*order.torchrun], "environment": dict(order.environment), "needs": [*order.needs]}
            self.send({"do": "launch", **told}, [log.fileno()])
        return ForkedAgent(self.answer(seconds, waiting, "forked").content["began"], self)

    def answer(self, seconds: float, waiting: Callable[[], object], what: str) -> Message:
        """What it says next, for which it has so many ``seconds``; ``waiting`` is called meanwhile.

        Raises:
            ColdStartError: it refuses, or is gone.
            NoAnswerError: it takes too long.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            message = self.listen(_POLL_SECONDS)
            if self.is_lost:
                raise ColdStartError(DIED)
            if message is not None and "refused" in message.content:
                raise ColdStartError(message.content["refused"])
            if message is not None and "ended" not in message.content:
                return message
            waiting()
        raise NoAnswerError(f"its fork server {what} for more than {seconds:.0f} s")


class ForkedAgent:
    """torchrun's agent, forked by a server that reaps it and tells its end. A ``Started``."""

    def __init__(self, pid: int, told: Conversation) -> None:
        self.pid, self._told = pid, told
        self._returncode: int | None = None
        self._process = _process(pid)

    @property
    def lost_server(self) -> bool:
        """Whether the server is gone, so that how this ended is not known."""
        return self._told.is_lost and self._told.returncode(self.pid) is None

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


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:  # it has ended already
        return None
