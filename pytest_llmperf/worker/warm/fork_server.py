"""``python -m pytest_llmperf.worker.warm.fork_server FD PARENT``: it has imported everything, and forks launches.

It trains nothing, initialises no GPU and has one thread, so that what it forks begins as a fresh process does. It is
told what to do over the socket pair at FD, by messages of JSON, and ends with whoever is at the other end:

    to it    {"do": "branch", "needs": ["family:llama", "liger"]} and the branch's own socket: a fork that imports these
             {"do": "launch", "torchrun": words, "environment"} and the open log: a fork that runs torchrun's agent
    from it  {"ready": {file: when it was changed last}} or {"refused": why}, once it has imported; for each launch
             {"began": pid} or {"refused": why}, and in the end {"ended": pid, "returncode"}

A branch is a fork server itself. One for each set of needs keeps what one spec imports from all others' launches."""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

from pytest_llmperf.support.interpreter import Channel, ChannelClosedError, Message, uncollected
from pytest_llmperf.worker import imports
from pytest_llmperf.worker.warm import agent, gpu_answers


class ImportWatch:
    """Names the innermost module whose code made this process unfit, while it is; empty where none did."""

    def __init__(self, is_unfit: Callable[[], bool]) -> None:
        self._is_unfit, self.culprit = is_unfit, ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts. Loaders are what they were afterwards: no module keeps a trace of it."""
        before = {kind: vars(kind).get("exec_module") for kind in (SourceFileLoader, ExtensionFileLoader)}
        for kind in before:
            setattr(kind, "exec_module", self._watched(kind.exec_module))  # noqa: B010 - to mypy a method stays
        try:
            yield
        finally:
            for kind, own in before.items():
                if own is None:
                    delattr(kind, "exec_module")
                else:
                    setattr(kind, "exec_module", own)  # noqa: B010

    def _watched(self, execute: Any) -> Any:
        def exec_module(loader: Any, module: ModuleType) -> None:
            was_unfit = self._is_unfit()  # before anything was watched, or by nobody's code
            try:
                execute(loader, module)
            finally:
                if not self._is_unfit():
                    self.culprit = ""  # what it started has ended again
                elif not self.culprit and not was_unfit:
                    self.culprit = module.__name__

        return exec_module


# As long as torchrun gives its ranks, and a little.
_GRACE_SECONDS = 35.0
_POLL_SECONDS = 0.02


class ForkServer:
    def __init__(self, channel: Channel) -> None:
        self._devices: gpu_answers.Devices | None = None
        """Answered for where CUDA would be asked; ``None``: there is none to answer for."""
        self._variables: Mapping[str, str | None] = {}
        """Environment variables that imports have set, or removed."""
        self._pages: frozenset[agent.Run] = frozenset()
        """Of files, which a fork has not read."""
        self._watch = ImportWatch(lambda: bool(_unfit()))
        self._listen(channel)

    def _listen(self, channel: Channel) -> None:
        """To whoever is at its other end; what this process was forked from has its own children."""
        self._channel, self._children = channel, _Children()
        self._agents: set[int] = set()
        self._branches: set[int] = set()

    def serve(self, needs: Sequence[str] | None) -> NoReturn:
        """Import (``None``: what every rank does), tell of it, and do what is asked until nobody asks any more."""
        try:
            agent.prctl(agent.SET_CHILD_SUBREAPER, 1)  # whoever reaps what has lost its own parent is known then
            self._channel.send(self._imports(needs))
            agent.prctl(agent.SET_PDEATHSIG, 0)  # the channel tells it from here on
            while True:
                select.select([self._channel.fileno(), self._children.fileno()], [], [])
                for pid, status in self._children.ended():
                    self._branches.discard(pid)
                    if pid in self._agents:
                        self._agents.remove(pid)
                        self._channel.send({"ended": pid, "returncode": os.waitstatus_to_exitcode(status)})
                if (message := self._channel.receive(0)) is not None:
                    self._answer(message)
        except ChannelClosedError:
            self._end_agents()
        except BaseException:  # noqa: BLE001 - a fork never returns into what its parent was doing
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _imports(self, needs: Sequence[str] | None) -> dict[str, Any]:
        before = _environment_at_start() if needs is None else dict(os.environ)
        try:
            with ExitStack() as stack:
                stack.enter_context(uncollected())
                if needs is None:
                    importlib.import_module("torch")  # it asks nothing, and is there to be answered for only then
                    self._devices = gpu_answers.ask()
                if self._devices is not None:
                    stack.enter_context(gpu_answers.given(self._devices))
                with self._watch.watching():
                    if needs is None:
                        for name in imports.EVERY_RANK:
                            importlib.import_module(name)
                    else:
                        imports.import_needs(needs)
                imports.patched_files()  # once for all ranks
        except gpu_answers.NoAnswersError as error:
            return {"refused": str(error)}
        except Exception as error:  # noqa: BLE001 - a cold launch's rank will tell it as it should be told
            traceback.print_exc()
            return {"refused": f"an import failed ({type(error).__name__}: {error})"}
        if refused := self._why_not():
            return {"refused": refused}
        changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
        self._variables = {**self._variables, **{name: os.environ.get(name) for name in changed}}
        if not gpu_answers.sees_gpus():  # else memory is the card's
            self._pages |= frozenset(agent.resident_runs())
        # Or each rank's first collection, the Trainer's, would copy each page that holds an object.
        gc.freeze()
        return {"ready": imports.sources()}

    def _why_not(self) -> str:
        """Why no launch can be forked from this process; empty where one can."""
        what, culprit = _unfit(), self._watch.culprit
        return f"{what}, by importing {culprit}" if what and culprit else what

    def _answer(self, message: Message) -> None:
        try:
            refused = self._why_not()
            if message.content["do"] == "launch":
                self._channel.send({"refused": refused} if refused else {"began": self._launch(message)})
            elif refused:  # whoever asks listens to the branch
                with socket.socket(fileno=os.dup(message.files[0])) as branch:
                    Channel(branch).send({"refused": refused})
            else:
                with self._fork() as (parent, pid):
                    if not pid:
                        channel = Channel(socket.socket(fileno=message.files[0]))
                        agent.die_with(parent, signal.SIGTERM)
                        self._listen(channel)
                        self.serve(message.content["needs"])
                self._branches.add(pid)
        finally:
            for file in message.files:
                os.close(file)

    def _launch(self, message: Message) -> int:
        given, asked = _environment_at_start(), message.content["environment"]
        # A default that an import sets, as torch does for its compiler's cache, gives way to the launch's own.
        imported = {name: to for name, to in self._variables.items() if name in given or name not in asked}
        environment = {name: value for name, value in {**asked, **imported}.items() if value is not None}
        order = agent.Order(message.content["torchrun"], environment, sorted(self._pages))
        with self._fork() as (parent, pid):
            if not pid:
                os._exit(agent.run_agent(order, message.files[0], parent))
        self._agents.add(pid)
        return pid

    @contextmanager
    def _fork(self) -> Iterator[tuple[int, int]]:
        """Yield the forking process's pid and ``os.fork``'s answer; in the fork nothing of the server is open."""
        agent.flush()
        parent = os.getpid()
        # Until its handlers are its own: a signal meant for the fork must not wake the parent.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
        try:
            if not (pid := os.fork()):
                self._children.close()
                self._channel.close()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM})
        try:
            yield parent, pid
        except BaseException:
            if pid:
                raise
            traceback.print_exc()
        if not pid:
            os._exit(1)

    def _end_agents(self) -> None:
        """Politely first, since only SIGTERM makes torchrun end its ranks; branches do the same by themselves."""
        for number, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, _GRACE_SECONDS)):
            for pid in self._agents | (self._branches if number == signal.SIGKILL else set()):
                os.kill(pid, number)
            deadline = time.monotonic() + seconds
            while (self._agents or self._branches) and time.monotonic() < deadline:
                ended = {pid for pid, _ in self._children.ended()}
                self._agents -= ended
                self._branches -= ended
                time.sleep(_POLL_SECONDS)


class _Children:
    """Wakes a ``select`` when a child ends, and reaps."""

    def __init__(self) -> None:
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # one that is not handled wakes nobody

    def fileno(self) -> int:
        return self._woken.fileno()

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._woken.close()
        self._waker.close()

    def ended(self) -> Iterator[tuple[int, int]]:
        """Each child that has ended, orphans that were adopted too, and its wait status."""
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                yield pid, status


def _unfit() -> str:
    """Why this process must not be forked; empty where it may."""
    if gpu_answers.is_initialised():
        return gpu_answers.INITIALISED
    if len(os.listdir("/proc/self/task")) == 1:  # noqa: PTH208 - after each of thousands of imports
        return ""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            of = getattr(getattr(thread, "_target", None), "__module__", None) or type(thread).__module__
            return f"a thread was started ({thread.name}, of {of})"
    return "a thread was started"


def _environment_at_start() -> dict[str, str]:
    """Before anything of Python's ran: a ``sitecustomize`` may have changed it since."""
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - bytes, and of no size
        pairs = (os.fsdecode(word).partition("=") for word in file.read().split(b"\0"))
        return {name: value for name, separator, value in pairs if separator}


if __name__ == "__main__":
    descriptor, start_process = map(int, sys.argv[1:])
    if start_process:  # 0 where its thread may end before this; a hanging import looks at no channel
        agent.die_with(start_process, signal.SIGTERM)
    ForkServer(Channel(socket.socket(fileno=descriptor))).serve(None)
