"""The retry of a launch that the circumstances spoilt: it is set aside and tried once more, later; once a case."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pytest_llmperf.judge import validity
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.spec.train_spec import TrainSpec

# What spoilt a launch (heat, somebody else's job) is seldom gone at once.
_PAUSE_SECONDS = 20.0


class LaunchRetry:
    """The launches of one case, and what is wrong with those that count."""

    def __init__(self, circumstances: Callable[[Launch], tuple[str, ...]], say: Callable[[str], None]) -> None:
        self._circumstances, self._say = circumstances, say
        self.set_aside: tuple[str, ...] = ()
        """Of the launch that was set aside."""
        self.spoilt: tuple[str, ...] = ()
        """Of launches that count all the same, because the retry was spoilt too."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the verdict should know of them."""
        return (f"one launch was set aside: {self.set_aside[0]}",) if self.set_aside else ()

    def launch(self, spec: TrainSpec, start: Callable[[TrainSpec], Launch]) -> Launch:
        """One launch of ``spec``.

        Raises:
            LaunchFailed: it yielded no record.
        """
        launch = _outcome(start, spec)
        lines = self._around(launch)
        if lines and not self.set_aside:
            self.set_aside = lines
            self._say(f"{spec.id}: {lines[0]}; set aside, launched once more in {_PAUSE_SECONDS:.0f} s")
            time.sleep(_PAUSE_SECONDS)
            drifted = any(line.startswith(validity.DRIFT) for line in lines)
            launch = _outcome(start, _longer(spec) if drifted else spec)
            lines = self._around(launch)
        self.spoilt = (*self.spoilt, *lines)
        if isinstance(launch, LaunchFailed):
            raise launch
        return launch

    def _around(self, launch: Launch | LaunchFailed) -> tuple[str, ...]:
        if isinstance(launch, Launch):
            return self._circumstances(launch)
        # Of what makes a launch fail, memory alone is what a neighbour takes.
        return validity.neighbours(launch.failure.health) if launch.failure.kind == "oom" else ()


def _outcome(start: Callable[[TrainSpec], Launch], spec: TrainSpec) -> Launch | LaunchFailed:
    try:
        return start(spec)
    except LaunchFailed as failed:
        return failed


def _longer(spec: TrainSpec) -> TrainSpec:
    return replace(spec, steps=2 * spec.steps, min_steps=2 * min(spec.min_steps, spec.steps))
