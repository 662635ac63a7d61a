"""Runner: one launch of one spec, on hardware leased for it, shown while it runs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pytest_llmperf.launch.leases import lease_cpu, lease_gpus
from pytest_llmperf.launch.local import Launcher, LaunchRequest, LocalLauncher
from pytest_llmperf.launch.machine import Gpu
from pytest_llmperf.measurement import Failure, Launch, LaunchFailed
from pytest_llmperf.plugin.failed import failed
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.plugin.show import LaunchShow, Show
from pytest_llmperf.spec import TrainSpec

# File systems allow 255 bytes, and a number follows.
_LONGEST_NAME = 200


class Runner:
    """Launches specs for one test."""

    def __init__(self, session: PerfSession, show: Show, launcher: Launcher | None = None) -> None:
        self._session, self._show = session, show
        self._launcher = launcher or LocalLauncher()
        self._held: tuple[Gpu, ...] | None = None

    @contextmanager
    def hold(self, num_gpus: int) -> Iterator[None]:
        """Keep the same hardware for every launch inside: what takes turns must take them in one place."""
        with self._lease(num_gpus) as gpus:
            self._held = gpus
            try:
                yield
            finally:
                self._held = None

    def launch(self, spec: TrainSpec, number: int, python: str = sys.executable) -> Launch:
        """Launch ``spec`` under ``python``; ``number`` counts the launches of this case from 1.

        Raises:
            LaunchFailed: it yielded no record.
        """
        settings = self._session.settings
        with self._lease(spec.gpus) as gpus, self._show.launch(spec.id, number, max(number, settings.launches)) as live:
            request = LaunchRequest(
                spec=spec,
                folder=self._folder(spec),
                gpus=gpus,
                timeout_seconds=settings.timeout_seconds,
                python=python,
            )
            outcome = self._run(request, live)
            if isinstance(outcome, Failure):
                raise LaunchFailed(spec.id, outcome)
            live.finished(outcome)
        return outcome

    def _run(self, request: LaunchRequest, live: LaunchShow) -> Launch | Failure:
        try:
            return self._launcher.launch(request, live.update)
        except KeyboardInterrupt:
            live.clear()
            self._show.say(f"{request.spec.id}: interrupted; its logs are in {request.folder}")
            raise

    def _folder(self, spec: TrainSpec) -> Path:
        home, name = self._session.run_folder, _file_name(spec.id)
        return home / f"{name}-{1 + sum(1 for _ in home.glob(f'{name}-*'))}"

    @contextmanager
    def _lease(self, num_gpus: int) -> Iterator[tuple[Gpu, ...]]:
        if self._held is not None:
            yield self._held[:num_gpus]
            return
        gpus: tuple[Gpu, ...] = ()
        with ExitStack() as held:
            try:  # around the lease alone: an OSError of the launch is none of its
                if self._session.on_cpu:
                    held.enter_context(lease_cpu(self._show.say))
                else:
                    gpus = held.enter_context(lease_gpus(num_gpus, self._session.machine.gpus, self._show.say))
            except OSError as error:
                raise failed(str(error)) from None
            yield gpus


def _file_name(name: str) -> str:
    """``name``, or as much of it as a file system takes, and a hash that keeps two long ones apart."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
