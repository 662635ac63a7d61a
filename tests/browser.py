"""A headless Chromium, driven by its own protocol over two pipes: no driver, no package, nothing downloaded.

https://chromedevtools.github.io/devtools-protocol/ has the commands.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: By the names under which distributions have it; empty where there is none.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)
# A browser on a busy machine, three times over.
_SECONDS = 60.0
# Where the browser reads its commands and writes its answers.
_READS, _WRITES = 3, 4

_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), " ": (32, " ")}


class BrowserError(Exception):
    """What the browser refused, or that it said nothing."""


class Browser:
    """One page of it, and what happened there."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        """Addresses that were asked for."""
        self.errors: list[str] = []
        """What the console told, and what no script caught."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the protocol."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']}")
                return message["result"]

    def _next(self) -> Any:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise BrowserError(f"no answer within {_SECONDS:.0f} s")
            read = os.read(self._answers, 2**20)
            if not read:
                raise BrowserError("it ended")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: Any) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded":
                self.errors.append(str(params["entry"]["text"]))
            case "Page.javascriptDialogOpening":
                self.errors.append(f"a dialog: {params['message']}")

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """The page at ``address``, loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call("Page.navigate", url=address)
        until = time.monotonic() + _SECONDS
        while self.evaluate("document.readyState + location.protocol") == "loadingabout:" or (
            self.evaluate("document.readyState") != "complete"
        ):
            if time.monotonic() > until:
                raise BrowserError(f"{address} is not loaded after {_SECONDS:.0f} s")

    def evaluate(self, script: str) -> Any:
        """The value of an expression there."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise BrowserError(str(told["exceptionDetails"]))
        return told["result"].get("value")

    def press(self, key: str) -> None:
        """A key that is pressed and let go: ``Tab``, ``Enter``, a space, or a letter."""
        code, text = _KEYS.get(key, (ord(key[0].upper()), key))
        names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **names, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    def picture(self, path: Path) -> None:
        """The whole page, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        told = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(told["data"]))

    def printed(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    """A fresh one, which knows nothing of others."""
    reads, commands = os.pipe()
    answers, writes = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        words = [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={folder}", "about:blank"]
        # Numbers that neither of the two must have had: a copy onto itself would be closed as it starts.
        high = [os.dup(fd) for fd in (reads, writes)]
        with Path(folder, "chromium.log").open("wb") as log:
            pid = os.posix_spawn(
                CHROMIUM,
                words,
                {**os.environ, "HOME": folder},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                    (os.POSIX_SPAWN_DUP2, high[0], _READS),
                    (os.POSIX_SPAWN_DUP2, high[1], _WRITES),
                ],
                setpgroup=0,
            )
        for fd in (reads, writes, *high):
            os.close(fd)
        try:
            yield Browser(commands, answers)
        finally:
            for fd in (commands, answers):
                os.close(fd)
            # It ends by itself when its pipe does; what does not is ended with all its processes.
            _end(pid)


def _end(pid: int) -> None:
    until = time.monotonic() + 3
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
