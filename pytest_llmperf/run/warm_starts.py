"""WarmStarts: what the launches of one run begin from, where they need not begin with an interpreter's start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_llmperf.launch.local import WarmStart, server_key, server_pool

if TYPE_CHECKING:
    from pytest_llmperf.launch.server_pool import ServerPool
    from pytest_llmperf.launch.slurm.node_servers import NodeServers
    from pytest_llmperf.run.context import Context


class WarmStarts:
    """One for a run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._said: set[str] = set()

    @property
    def _is_cold(self) -> bool:
        return self._context.settings.start == "cold"

    @cached_property
    def _servers(self) -> ServerPool:
        """This machine's."""
        return server_pool(lambda: self._context.run_folder)

    @cached_property
    def on_nodes(self) -> NodeServers | None:
        """The SLURM job's; ``None``: launches begin cold, or there is no such job."""
        if self._is_cold or self._context.srun is None:
            return None
        from pytest_llmperf.launch.slurm.node_servers import NodeServers

        return NodeServers(self._context.srun, lambda: self._context.run_folder)

    def prepare(self) -> None:
        """Let the imports begin, so that they run beside what comes before the first launch."""
        settings = self._context.settings
        if settings.dry_run or settings.update == "prune" or self._is_cold:
            return
        if self.on_nodes is not None:
            self.on_nodes.prepare()
        else:
            for python in dict.fromkeys((sys.executable, settings.against or sys.executable)):
                self._servers.prepare(server_key(python, os.environ, on_gpu=not self._context.on_cpu))

    def start(self, say: Callable[[str], None]) -> WarmStart | None:
        """How a launch begins warm; ``None``: it begins cold. ``say`` is told why, where it was to be warm."""
        if self._is_cold:
            return None
        is_required = self._context.settings.start == "warm"
        return WarmStart(self._servers, say, is_required=is_required, said=self._said)

    def close(self) -> None:
        """End what runs beside the launches."""
        for name in ("_servers", "on_nodes"):
            servers = self.__dict__.get(name)  # asked for only where it was
            if servers is not None:
                servers.close()
