"""The fork servers of one run: which of them a launch may begin from, when one is stale, and why there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.launch.forked_agent import ColdStartError, ForkedAgent, LaunchOrder
from pytest_llmperf.launch.server_process import ServerProcess

# Each holds 0.6 GB; two are what a comparison of two environments needs.
_MOST_SERVERS = 2

# What a launch sets for itself, and ranks look at when they need it: none of it is read by an import.
_LIVE = frozenset({"CUDA_VISIBLE_DEVICES", "LLMPERF_LAUNCHER_BOOT", "LLMPERF_INJECT", "PYTEST_CURRENT_TEST"})

# For imports alone. OpenBLAS begins its threads while it is loaded, and so does the jemalloc inside of pyarrow, which
# the Trainer imports where datasets is installed; torch has no question that NVML cannot answer.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
_WHILE_IMPORTING_BESIDE_GPUS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class ServerKey:
    """What a process is made of from its start on: nothing of it can change later."""

    python: str
    environment: frozenset[tuple[str, str]]
    folder: str
    """In which it starts: the first place where ``python -m`` looks for modules."""
    on_gpu: bool

    @classmethod
    def of(cls, python: str, environment: Mapping[str, str], folder: str, *, on_gpu: bool) -> ServerKey:
        """Of a rank in ``environment``, which names no folder of a single launch, and in ``folder``."""
        lasting = frozenset((name, value) for name, value in environment.items() if name not in _LIVE)
        return cls(python, lasting, folder, on_gpu)


class ServerPool:
    """Starts servers, keeps the ones that were used last, and ends them all."""

    def __init__(
        self,
        folder: Callable[[], Path],
        python_path: Callable[[str, Path], str],
        marks: Mapping[str, str] | None = None,
    ) -> None:
        """``folder`` is where they may leave logs; ``python_path`` makes there what an interpreter needs to find this
        package, for as long as a server lives; by the variables ``marks`` others tell whose processes they are."""
        self._folder, self._python_path, self._marks = folder, python_path, marks or {}
        self._servers: dict[ServerKey, ServerProcess] = {}
        self._cold: dict[ServerKey, str] = {}
        self._num_started = 0
        self._is_closed = False

    def prepare(self, key: ServerKey) -> None:
        """Let a server begin its imports; why it cannot is told to the launch that wants it."""
        with suppress(ColdStartError):
            self._server(key)

    def launch(self, key: ServerKey, order: LaunchOrder, waiting: Callable[[], object]) -> ForkedAgent:
        """A torchrun, forked by the server of ``key``; ``waiting`` is called while that still imports.

        Raises:
            ColdStartError: it must begin cold.
            OSError: its log cannot be written.
        """
        server = self._server(key)
        try:
            return server.launch(order, waiting)
        except ColdStartError as error:
            if server.is_over or not server.is_ready:  # it never will be
                self._cold[key] = str(error)
                self._end(key)
            raise

    def close(self) -> None:
        """End them all; what is launched later begins cold."""
        self._is_closed = True
        for key in list(self._servers):
            self._end(key)

    def _server(self, key: ServerKey) -> ServerProcess:
        if self._is_closed:
            raise ColdStartError("the run is at its end")
        if key in self._cold:
            raise ColdStartError(self._cold[key])
        server = self._servers.pop(key, None)
        if server is not None and (server.is_over or server.is_stale):
            server.end()
            server = None
        if server is None:
            server = self._started(key)
        self._servers[key] = server  # the last is the one that was used last
        while len(self._servers) > _MOST_SERVERS:
            self._end(next(iter(self._servers)))
        return server

    def _started(self, key: ServerKey) -> ServerProcess:
        self._num_started += 1
        try:
            home = self._folder() / f"fork-server-{self._num_started}"
            home.mkdir()
            return ServerProcess(key.python, self._environment(key, home), key.folder, home / "server.log")
        except OSError as error:
            self._cold[key] = f"no fork server could be started ({error})"
            raise ColdStartError(self._cold[key]) from None

    def _environment(self, key: ServerKey, home: Path) -> dict[str, str]:
        environment = {**self._marks, **dict(key.environment), **_WHILE_IMPORTING}
        path = [self._python_path(key.python, home), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        if not key.on_gpu:
            return {**environment, "CUDA_VISIBLE_DEVICES": ""}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return {**environment, **shown, **_WHILE_IMPORTING_BESIDE_GPUS}

    def _end(self, key: ServerKey) -> None:
        server = self._servers.pop(key, None)
        if server is not None:
            server.end()
