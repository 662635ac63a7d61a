"""A process that has imported pytest and its plugins, and is forked for each pytest that a test runs.

A pytest of its own costs a second of imports, and hundreds of tests run one. What is forked is as good as new: nothing
but modules is shared, and what reads the environment while it is imported is not among them. Started once a session
(under xdist, by each worker).
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

_LONGEST_REQUEST = 2**20
_STREAMS = 2

_REPOSITORY = str(Path(__file__).parents[1])

# With one of these set an interpreter, or pytest's imports, would be another. A test of what is imported sets ours.
_OTHER = frozenset(
    "LANG LC_ALL LLMPERF_TEST_FRESH PYTEST_DISABLE_PLUGIN_AUTOLOAD PYTEST_PLUGINS PYTHONDEVMODE PYTHONIOENCODING "
    "PYTHONUNBUFFERED PYTHONUTF8 PYTHONWARNINGS".split()
)
# Hypothesis' plugin imports this at the end of each session, whoever used it. As a plugin, so that it is rewritten too.
_EARLIER = "hypothesis.internal.observability"
# What a run imports sooner or later, and no plugin does at once.
_LATER = (  # tests/plugin/test_hygiene.py holds it
    "faulthandler",
    "pdb",
    "pynvml",
    "pytest_benchmark.storage.file",
    "pytest_llmperf.launch.histories",
    "pytest_llmperf.judge.run_effects",
    "pytest_llmperf.plugin.collector",
    "pytest_llmperf.plugin.perf",
    "pytest_llmperf.plugin.console",
    "pytest_llmperf.plugin.markers",
    "pytest_llmperf.report.exports",
    "pytest_llmperf.run.cases",
    "pytest_llmperf.run.cases",
    "pytest_llmperf.run.run_end",
    "rich.console",
    "rich.table",
    "scipy.special",
    "sqlite3",
    "tests.fakes",
    "xdist.remote",
)
# Of types that a run reads from files something is made when the first one is read.
_READ = (
    "judge.baseline.Baseline judge.baseline._Stored judge.store.Accepted records.calibration.Health "
    "records.launch.Environment records.launch.Launch records.launch.RankRecord records.result.CaseResult "
    "records.result.Check records.result.Spent records.results_document.ResultsDocument"
).split()


def _line(connection: socket.socket) -> bytes:
    """One line and no byte more: of a pytest that ends at once the next one may be there already."""
    line = b""
    while not line.endswith(b"\n") and (byte := connection.recv(1)):
        line += byte
    return line


class Forked:
    """A pytest that was forked, as ``subprocess.Popen`` would have it."""

    stdin = None

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(_line(connection))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; a signal's is negative."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(_line(self._connection))
            except TimeoutError:
                raise subprocess.TimeoutExpired("pytest", timeout or 0.0) from None
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class Template:
    """The process that is forked."""

    def __init__(self, home: Path) -> None:
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, (home / "template.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.template", str(theirs.fileno())],
                cwd=home,  # where there is no configuration and no conftest
                pass_fds=[theirs.fileno()],
                # numpy starts no threads: what has some is not to be forked.
                env={**self._environment, "PYTHONPATH": _REPOSITORY, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether an interpreter with this environment would have imported the same."""
        return not any(environment.get(name) != self._environment.get(name) for name in _OTHER)

    def popen(self, arguments: Sequence[str], out: IO[Any], err: IO[Any]) -> Forked:
        """``python -m pytest`` with these arguments, in this folder and environment."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        request = {"arguments": list(arguments), "folder": str(Path.cwd()), "environment": dict(os.environ)}
        with theirs:
            fds = array.array("i", [out.fileno(), err.fileno(), theirs.fileno()])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            self._socket.sendmsg([json.dumps(request).encode()], ancillary)
        return Forked(ours)

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.terminate()  # whatever was forked of this process without our knowing may hold the socket
        self._process.wait()


def serve(listener: socket.socket) -> None:
    """Fork for each request until nobody is there to ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        message, fds = _received(listener, _STREAMS + 1)
        if not message:
            return
        # One that is forked stays between: it waits for pytest and tells how it ended, while others are served.
        if os.fork() == 0:
            listener.close()
            _wait_for(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _wait_for(request: Mapping[str, Any], out: int, err: int, connection: int) -> None:
    workers = _Workers() if any(word.startswith(("-n", "--numprocesses")) for word in request["arguments"]) else None
    pid = os.fork()
    if pid == 0:
        os.close(connection)
        _run(request, out, err, workers)
    if workers is not None:
        workers.close()
    os.close(out)
    os.close(err)
    _tell_end(pid, connection)


def _tell_end(pid: int, connection: int) -> None:
    with suppress(OSError):  # nobody asks any more
        os.write(connection, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(connection, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _received(listener: socket.socket, count: int) -> tuple[bytes, array.array[int]]:
    """A message and the ``count`` descriptors that came with it; nothing where nobody is there to ask."""
    fds = array.array("i")
    message, ancillary, _, _ = listener.recvmsg(_LONGEST_REQUEST, socket.CMSG_LEN(fds.itemsize * count))
    if message:
        fds.frombytes(ancillary[0][2])
    return message, fds


class _Workers:
    """A process that is forked before pytest runs, and from which its workers are forked as clean as it was."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._socket.close()
            self._serve(theirs)
        theirs.close()

    def close(self) -> None:
        self._socket.close()

    def give(self) -> None:
        """Let execnet have its workers from here."""
        io: Any = importlib.import_module("execnet.gateway_io")
        asked = self._socket

        class Popen:
            """What execnet uses of ``subprocess.Popen``."""

            def __init__(self, *_: object, **__: object) -> None:
                (come, self_in), (self_out, go) = os.pipe(), os.pipe()
                ours, theirs = socket.socketpair()
                request = {"folder": str(Path.cwd()), "environment": dict(os.environ), "path": sys.path}
                fds = array.array("i", [come, go, 2, theirs.fileno()])
                asked.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                for fd in (come, go):
                    os.close(fd)
                theirs.close()
                self.stdin, self.stdout = open(self_in, "wb"), open(self_out, "rb")  # noqa: SIM115, PTH123
                self._forked = Forked(ours)

            def wait(self) -> int:
                return self._forked.wait()

            def kill(self) -> None:
                self._forked.kill()

        def begin(self: Any, _: object, execmodel: Any) -> None:
            self.popen = Popen()
            io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

        io.Popen2IOMaster.__init__ = begin

    def _serve(self, listener: socket.socket) -> None:
        while True:
            message, fds = _received(listener, _STREAMS + 2)
            if not message:
                os._exit(0)
            if os.fork() == 0:
                listener.close()
                self._wait_for_worker(json.loads(message), *fds)
            for fd in fds:
                os.close(fd)

    def _wait_for_worker(self, request: Mapping[str, Any], come: int, go: int, err: int, connection: int) -> None:
        pid = os.fork()
        if pid == 0:
            os.close(connection)
            self._work(request, come, go, err)
        for fd in (come, go, err):
            os.close(fd)
        _tell_end(pid, connection)

    def _work(self, request: Mapping[str, Any], come: int, go: int, err: int) -> None:
        """What ``python -u -c`` does with execnet's first line."""
        code = 1
        try:
            for fd, own in ((come, 0), (go, 1), (err, 2)):
                os.dup2(fd, own)
                os.close(fd)
            sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
            _begin_as(request)
            sys.path[:], sys.argv = request["path"], ["-c"]
            exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
            code = 0
            with suppress(Exception):
                atexit._run_exitfuncs()
        finally:
            os._exit(code)


def _begin_as(request: Mapping[str, Any]) -> None:
    """In that folder and environment, with the streams that are open now."""
    sys.stdout, sys.stderr = (open(fd, "w", encoding="utf-8", closefd=False) for fd in (1, 2))  # noqa: SIM115
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])


def _run(request: Mapping[str, Any], out: int, err: int, workers: _Workers | None) -> None:
    code = 1
    try:
        folder = str(Path.cwd())
        os.dup2(out, 1)
        os.dup2(err, 2)
        _begin_as(request)
        if workers is not None:
            workers.give()
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        own = {folder, _REPOSITORY}
        sys.path[:] = [request["folder"], *paths, *(path for path in sys.path if path not in own)]
        sys.argv = ["pytest", *request["arguments"]]
        try:
            runpy.run_module("pytest", run_name="__main__", alter_sys=False)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        with suppress(Exception):
            atexit._run_exitfuncs()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _remember_what_is_installed() -> None:
    """In each fork it is the same; pytest asks for all files of all its plugins."""
    for name in ("entry_points", "files", "metadata"):
        own, kept = getattr(metadata.Distribution, name).fget, dict[str, Any]()

        def remembered(self: Any, own: Any = own, kept: dict[str, Any] = kept) -> Any:
            place = str(self._path)
            if place not in kept:
                kept[place] = own(self)
            return kept[place]

        setattr(metadata.Distribution, name, property(remembered))


def _read_records() -> None:
    codec = importlib.import_module("pytest_llmperf.support.codec")
    for name in _READ:
        module, _, kind = f"pytest_llmperf.{name}".rpartition(".")
        with suppress(ValueError):  # it has no fields
            codec.read_fields(getattr(importlib.import_module(module), kind), {})
    importlib.import_module("pytest_llmperf.settings.registry").Evidence.read({})


def _main(fd: int) -> None:
    import pytest  # noqa: PLC0415 - here, and not where tests import this file

    _remember_what_is_installed()
    # pytest imports its plugins itself, as it does in a process of its own: it rewrites their assertions.
    pytest.main(["--version", "--version", "-p", _EARLIER])
    for name in _LATER:
        importlib.import_module(name)
    _read_records()
    # What is there already is no garbage of a run's: to go through it again at the end of each is half of its time.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=fd) as listener:
        serve(listener)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
