"""Runner: one launch of one spec, on hardware leased for it, shown while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_llmperf.launch.leases import lease_cpu, lease_gpus
from pytest_llmperf.launch.local import Launcher, LaunchRequest, LocalLauncher
from pytest_llmperf.launch.machine import Gpu
from pytest_llmperf.measurement import Failure, Launch, LaunchFailed
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.plugin.show import Show
from pytest_llmperf.spec import TrainSpec


class Runner:
    """Launches specs for one test."""

    def __init__(self, session: PerfSession, show: Show, launcher: Launcher | None = None) -> None:
        self._session, self._show = session, show
        self._launcher = launcher or LocalLauncher()

    def launch(self, spec: TrainSpec, number: int) -> Launch:
        """Launch ``spec``; ``number`` counts the launches of this case from 1.

        Raises:
            LaunchFailed: it yielded no record.
        """
        settings = self._session.settings
        with self._lease(spec) as gpus, self._show.launch(spec.id, number, settings.launches) as live:
            request = LaunchRequest(
                spec=spec, folder=self._folder(spec), gpus=gpus, timeout_seconds=settings.timeout_seconds
            )
            outcome = self._launcher.launch(request, live.update)
            if isinstance(outcome, Failure):
                raise LaunchFailed(spec.id, outcome)
            live.finished(outcome)
        return outcome

    def _folder(self, spec: TrainSpec) -> Path:
        home = self._session.run_folder
        return home / f"{spec.id}-{1 + sum(1 for _ in home.glob(f'{spec.id}-*'))}"

    @contextmanager
    def _lease(self, spec: TrainSpec) -> Iterator[tuple[Gpu, ...]]:
        if self._session.on_cpu:
            with lease_cpu(self._show.say):
                yield ()
        else:
            with lease_gpus(spec.gpus, self._session.machine.gpus, self._show.say) as gpus:
                yield gpus
