"""WarmStarts: what the launches of one run begin from, where they need not begin with an interpreter's start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_llmperf.launch.local import WarmStart, server_key, server_pool
from pytest_llmperf.run.errors import UsageError

if TYPE_CHECKING:
    from pytest_llmperf.launch.server_pool import ServerPool
    from pytest_llmperf.run.context import Context


class WarmStarts:
    """One for a run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._said: set[str] = set()

    @cached_property
    def _servers(self) -> ServerPool | None:
        """``None``: launches begin cold."""
        start = self._context.settings.start
        if start == "cold":
            return None
        if self._context.cluster is None:
            return server_pool(lambda: self._context.run_folder)
        if start == "warm":
            raise UsageError(
                "--perf-start warm: what srun starts begins cold; leave it out, or add --perf-launcher local (pytest's)"
            )
        return None

    def prepare(self) -> None:
        """Let the imports begin, so that they run beside what comes before the first launch.

        Raises:
            UsageError: launches must begin warm, and cannot.
        """
        settings = self._context.settings
        if settings.dry_run or settings.update == "prune" or self._servers is None:
            return
        for python in dict.fromkeys((sys.executable, settings.against or sys.executable)):
            self._servers.prepare(server_key(python, os.environ, on_gpu=not self._context.on_cpu))

    def start(self, say: Callable[[str], None]) -> WarmStart | None:
        """How a launch begins warm; ``None``: it begins cold. ``say`` is told why, where it was to be warm.

        Raises:
            UsageError: it must begin warm, and srun would start it.
        """
        if self._servers is None:
            return None
        is_required = self._context.settings.start == "warm"
        return WarmStart(self._servers, say, is_required=is_required, said=self._said)

    def close(self) -> None:
        """End what runs beside the launches."""
        servers = self.__dict__.get("_servers")  # asked for only where it was
        if servers is not None:
            servers.close()
