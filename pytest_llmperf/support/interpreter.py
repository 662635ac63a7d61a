"""What holds for this whole process: signals that end a run early, garbage, NumPy at its first use; and what it says to
another, over a socket: messages of JSON, with open files where need be."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from signal import Signals
from types import FrameType
from typing import Any, TypeAlias

#: What ends a SLURM job's run: scancel and preemption, and ``sbatch --signal``.
OF_A_JOB = (signal.SIGTERM, signal.SIGUSR1)
#: What a shell's ``kill``, ``timeout``, a CI runner or a container's stop sends.
OF_A_HOST = (signal.SIGTERM,)


def end_on(signals: tuple[Signals, ...], ended_by: Callable[[str], None]) -> Callable[[], None]:
    """``signals`` end the run as Ctrl-C does, ``ended_by`` hears which; others' are left. Returns what undoes it."""

    def handler(number: int, _frame: FrameType | None) -> None:
        for known in minded:
            signal.signal(known, signal.SIG_IGN)  # SLURM repeats itself, and the ending must come to its end
        ended_by(Signals(number).name)
        raise KeyboardInterrupt(Signals(number).name)

    minded = [known for known in signals if signal.getsignal(known) is signal.SIG_DFL]
    try:
        for known in minded:
            signal.signal(known, handler)
    except ValueError:  # not the main thread: whoever embeds pytest there minds its signals
        return lambda: None

    def restore() -> None:
        for known in minded:
            signal.signal(known, signal.SIG_DFL)

    return restore


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports: to look through their objects, which stay, is a fifth of their time. Nothing is left of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation: the next object would else be a reason to look through them
            gc.enable()


#: One of NumPy, which counts as Any.
Array: TypeAlias = Any


class _Module:
    """A module that is imported when something in it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)  # it is asked for once
        return value


np: Any = _Module("numpy")
special: Any = _Module("scipy.special")
sparse: Any = _Module("scipy.sparse")


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for what NumPy computes inside: several take a hundred times as long where all cores train."""
    with _controller().limit(limits=1, user_api="blas"):
        yield


@cache
def _controller() -> Any:
    import_module("numpy")  # what is not loaded by then is not found
    return import_module("threadpoolctl").ThreadpoolController()


# Channel: one end of a socket between two processes.
_HEADER = struct.Struct("!Q")

# The other end writes a message at once. One that was stopped in the middle of it is as good as gone.
_REST_SECONDS = 30.0

_MOST_FILES = 4


class ChannelClosedError(Exception):
    """Nobody is at the other end."""


@dataclass(frozen=True)
class Message:
    """What came, and the descriptors of the files that came with it: the receiver's to close."""

    content: dict[str, Any]
    files: tuple[int, ...]


class Channel:
    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.settimeout(_REST_SECONDS)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, content: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send ``content``, and copies of the open ``files``; ChannelClosedError where the other end is gone."""
        body = json.dumps(content).encode()
        try:
            socket.send_fds(self._socket, [_HEADER.pack(len(body))], list(files))
            self._socket.sendall(body)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; ``None``: none within ``timeout`` s. ChannelClosedError: nobody is there any more."""
        try:
            if not select.select([self._socket], [], [], timeout)[0]:
                return None
            header, files, _, _ = socket.recv_fds(self._socket, _HEADER.size, _MOST_FILES)
            try:
                header += self._exactly(_HEADER.size - len(header))
                return Message(json.loads(self._exactly(_HEADER.unpack(header)[0])), tuple(files))
            except (OSError, ValueError, ChannelClosedError):
                for file in files:
                    os.close(file)
                raise
        except (OSError, ValueError) as error:  # a ValueError: half a message
            raise ChannelClosedError(str(error)) from error

    def say_no_more(self) -> None:
        """Let the other end know that nobody will ask it for anything more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the other end is gone, and let go of what it still says."""
        deadline = time.monotonic() + seconds
        with suppress(ChannelClosedError, OSError, ValueError):
            while (left := deadline - time.monotonic()) > 0:
                message = self.receive(left)
                for file in message.files if message else ():
                    os.close(file)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _exactly(self, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            if not (part := self._socket.recv(size - len(read))):
                raise ChannelClosedError("the other end is gone")
            read += part
        return bytes(read)
