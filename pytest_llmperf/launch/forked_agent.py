"""A launch that was forked, and the conversation with whoever forked it: a fork server, or a node's of a SLURM job."""

from __future__ import annotations

import math
import os
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
# Whoever forked an agent reaps it, and tells at once.
_REAP_SECONDS = 30.0
# A node's server says now and then that it still waits for imports; what it ends of an earlier launch takes longer.
_SILENT_SECONDS = 120.0

DIED = "its fork server died"
#: What one says that cannot fork yet, and works on it.
WAITS = "waits"


class ColdStartError(Exception):
    """Why a launch cannot begin warm."""


class LostServerError(ColdStartError):
    """Its server is gone: another may."""


class NoAnswerError(LostServerError):
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
    """With one process that imports, and then forks launches."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.is_lost = False
        self.sources: Mapping[str, int] = {}
        """The files that it has imported, and when each was changed last."""
        self._returncodes: dict[int, int] = {}

    def returncode(self, pid: int) -> int | None:
        """The return code of an agent that has ended."""
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
            raise LostServerError(DIED) from None

    def imported(self, seconds: float, waiting: Callable[[], object]) -> None:
        """Wait until it has imported what it was told to; ColdStartError where it cannot fork launches."""
        self.sources = self.answer(seconds, waiting, "imported").content["ready"]

    def launch(
        self, order: LaunchOrder, seconds: float, waiting: Callable[[], object], more: Mapping[str, Any] | None = None
    ) -> ForkedAgent:
        """A torchrun, forked within so many ``seconds``.

        ``more`` is what a node's server has to know beside the order; it says meanwhile that it waits. Raises
        ColdStartError where there is none, OSError where its log cannot be written.
        """
        words = {"torchrun": [*order.torchrun], "environment": dict(order.environment), "needs": [*order.needs]}
        with order.log.open("wb") as log:
            self.send({"do": "launch", **words, **(more or {})}, [log.fileno()])
        silent = math.inf if more is None else _SILENT_SECONDS
        return ForkedAgent(self.answer(seconds, waiting, "forked", silent).content["began"], self)

    def answer(self, seconds: float, waiting: Callable[[], object], what: str, silent: float = math.inf) -> Message:
        """What it says next, for which it has so many ``seconds``; ``waiting`` is called meanwhile.

        For more than ``silent`` seconds it says nothing at all only if it was stopped. Raises ColdStartError where it
        refuses, LostServerError where it is gone, NoAnswerError where it takes too long: nobody talks with it any more.
        """
        deadline, heard = time.monotonic() + seconds, time.monotonic()
        why = f"its fork server {what} for more than {seconds:.0f} s"
        while time.monotonic() < deadline:
            message = self.listen(_POLL_SECONDS)
            if self.is_lost:
                raise LostServerError(DIED)
            content = {} if message is None else message.content
            if WAITS in content:
                heard = time.monotonic()
            elif time.monotonic() - heard > silent:
                why = f"its fork server said nothing for more than {silent:.0f} s"
                break
            elif "refused" in content:
                raise ColdStartError(content["refused"])
            elif message is not None and "ended" not in content:
                return message
            waiting()
        # What it says later must be nobody's answer, and what it begins later nobody's launch.
        self.channel.close()
        self.is_lost = True
        raise NoAnswerError(why)


class ForkedAgent:
    """torchrun's agent, forked by a server that reaps it and tells its end. A ``Started``."""

    def __init__(self, pid: int, server: Conversation) -> None:
        self.pid, self._server = pid, server
        self._returncode: int | None = None
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):  # it may have ended already
            self._process = psutil.Process(pid)
        self._gone_at = math.inf
        self._is_untold = False

    @property
    def lost_server(self) -> bool:
        """Whether the server is gone, or was stopped, so that how this ended is not known."""
        return self._is_untold or (self._server.is_lost and self._server.returncode(self.pid) is None)

    def poll(self) -> int | None:
        """See ``Started``; of a server that is gone, whose agents get SIGTERM by the kernel: SIGTERM's.

        So of one that was stopped, unless the kernel still has how this ended.
        """
        if self._returncode is None:
            self._returncode = self._server.returncode(self.pid)
        if self._returncode is None and not self._is_alive():
            self._gone_at = min(self._gone_at, time.monotonic())
            if self._server.is_lost:
                self._returncode = -signal.SIGTERM
            elif time.monotonic() - self._gone_at > _REAP_SECONDS:
                unreaped = _returncode_of_zombie(self.pid)
                self._is_untold = unreaped is None
                self._returncode = -signal.SIGTERM if unreaped is None else unreaped
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

    def _is_alive(self) -> bool:
        with suppress(psutil.Error):
            known = self._process
            return known is not None and known.is_running() and known.status() != psutil.STATUS_ZOMBIE
        return False


def _returncode_of_zombie(pid: int) -> int | None:
    """How a process ended that nobody has reaped; ``None`` where that is not known.

    Source: proc_pid_stat(5), state (3) and exit_code (52), which its own user may read.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None
    except (OSError, ValueError, IndexError):
        return None
