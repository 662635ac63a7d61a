"""PredictionProcess: ``worker.estimate`` beside this process, asked over a pipe; it imports torch, and this one not."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# Without a word from it, imports before the first answer and one prediction that hangs, which it ends itself, included.
_SECONDS = 300
_END_SECONDS = 1.0
# Where the process ended before it could say what is wrong: a traceback's last word, which advice may follow.
_ERROR = re.compile(r"^[\w.]+(?:Error|Exception): (.*)$", re.MULTILINE)
_PACKAGE_PARENT = Path(__file__).parents[2]


class PredictionProcess:
    """Answers by number, in the order of what was asked; it is started by the first question."""

    def __init__(self, niceness: int = 0) -> None:
        """``niceness`` is above 0 where others train beside it."""
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process, which close() ends
        self._asked = 0
        self._unsent, self._rest = b"", b""
        self._is_open = True
        self._known: dict[int, Mapping[str, Any]] = {}

    def ask(self, request: Mapping[str, Any]) -> int:
        """The number of the answer to ``request``, as ``worker.estimate`` has them."""
        if self._process is None:
            self._process = started(self._errors, self._niceness)
        self._unsent += json.dumps(request).encode() + b"\n"
        self._asked += 1
        self._exchange(0.0)
        return self._asked - 1

    def end_of_questions(self) -> None:
        """What runs may end once it has answered."""
        self._is_open = False
        if self._process is not None:
            self._exchange(0.0)

    def answer(self, number: int) -> Mapping[str, Any]:
        """What was answered; ``{"error": why}`` where nothing was."""
        while number not in self._known and self._exchange(_SECONDS):
            pass
        return self._known.get(number) or {"error": self._why_none(), "is_lost": True}

    def close(self) -> None:
        """End it, with all that it has forked."""
        process, self._process = self._process, None
        if process is None:
            self._errors.close()
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # where it has ended and was reaped, no such group is left
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._errors.close()

    def _exchange(self, seconds: float) -> bool:
        """Send what waits and read what is there; whether there was anything in time."""
        process = self._process
        if process is None or process.stdout is None:
            return False
        sends = [process.stdin] if process.stdin is not None and not process.stdin.closed and self._unsent else []
        readable, writable, _ = select.select([process.stdout], sends, [], max(0.0, seconds))
        if writable and process.stdin is not None:
            self._send(process.stdin.fileno())
        if not self._is_open and not self._unsent and process.stdin is not None and not process.stdin.closed:
            process.stdin.close()
        if not readable:
            return bool(writable)
        read = os.read(process.stdout.fileno(), 2**16)
        self._take(read)
        return bool(read)

    def _send(self, descriptor: int) -> None:
        try:
            self._unsent = self._unsent[os.write(descriptor, self._unsent[:4096]) :]
        except BrokenPipeError:  # it ended: its answers, or their absence, say so
            self._unsent = b""

    def _take(self, read: bytes) -> None:
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a library may print, too
                value = json.loads(line)
                if isinstance(value, dict) and "number" in value:
                    self._known[value["number"]] = value

    def _why_none(self) -> str:
        if self._process is None:
            return "its process was ended"
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"no answer after {_SECONDS} s"
        self._errors.seek(0)
        said: list[str] = _ERROR.findall(self._errors.read().decode(errors="replace"))
        return (said or [f"it ended with exit code {code} and said nothing"])[-1]


def started(errors: Any, niceness: int = 0) -> subprocess.Popen[bytes]:
    """The process."""
    path = os.pathsep.join([str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A GPU that happens to be here would only be woken up. A prediction uses one core.
    fixed = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_llmperf.worker.estimate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, **fixed},
        start_new_session=True,  # it is ended with all that it has forked
    )
    if niceness:
        with suppress(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
    return process
