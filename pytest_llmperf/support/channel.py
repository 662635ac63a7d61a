"""Channel: one end of a socket between two processes: messages of JSON, with open files where need be."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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
            part = self._socket.recv(size - len(read))
            if not part:
                raise ChannelClosedError("the other end is gone")
            read += part
        return bytes(read)
