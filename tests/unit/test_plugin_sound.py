"""The retry of a launch that was spoilt."""

from __future__ import annotations

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge import validity
from pytest_llmperf.measurement import Launch
from pytest_llmperf.plugin import sound
from pytest_llmperf.plugin.sound import SoundLaunches
from tests.fakes import launch_of


@pytest.mark.parametrize(
    ("steps", "min_steps", "expected"), [(60, 16, (120, 32)), (12, 12, (24, 24)), (10, 16, (20, 20))]
)
def test_after_drift_it_takes_twice_the_steps(
    monkeypatch: pytest.MonkeyPatch, steps: int, min_steps: int, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(sound, "_PAUSE_SECONDS", 0.0)
    started: list[TrainSpec] = []

    def start(spec: TrainSpec) -> Launch:
        started.append(spec)
        return launch_of(spec)

    troubles = iter([(f"{validity.DRIFT} of 5 %",), ()])
    launches = SoundLaunches(lambda _: next(troubles), lambda _: None)
    launches.launch(TrainSpec(model="llama-tiny", steps=steps, min_steps=min_steps), start)
    assert [(spec.steps, spec.min_steps) for spec in started] == [(steps, min_steps), expected]
