"""The retry of a launch that was spoilt."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llmperf import ScriptSpec, TrainSpec
from pytest_llmperf.judge.validity import Circumstances
from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run import runner
from pytest_llmperf.run.runner import LaunchRetry
from tests.fakes import launch_of
from tests.golden import Golden


@pytest.mark.parametrize(
    ("steps", "min_steps", "expected"), [(60, 16, (120, 32)), (12, 12, (24, 24)), (10, 16, (20, 20))]
)
def test_after_drift_it_takes_twice_the_steps(
    monkeypatch: pytest.MonkeyPatch, steps: int, min_steps: int, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(runner, "_PAUSE_SECONDS", 0.0)
    started: list[TrainSpec] = []

    def launch(spec: TrainSpec, _number: int, **_: Any) -> Launch:
        started.append(spec)
        return launch_of(spec)

    launcher: Any = SimpleNamespace(launch=launch)
    around = iter([Circumstances(drift="it drifted"), Circumstances()])
    spec = TrainSpec(model="llama-tiny", steps=steps, min_steps=min_steps)
    LaunchRetry(launcher, lambda _: None).launch(spec, 1, lambda _: next(around))
    assert [(spec.steps, spec.min_steps) for spec in started] == [(steps, min_steps), expected]


def test_a_script_that_drifts_again_is_judged_by_what_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PAUSE_SECONDS", 0.0)
    launcher: Any = SimpleNamespace(launch=lambda _spec, _number, **_: launch_of(SPEC))
    for spec, spoilt, notes in [(SPEC, ("hot", "it drifted"), 1), (ScriptSpec(command="python train.py"), ("hot",), 2)]:
        retry = LaunchRetry(launcher, lambda _: None)
        retry.launch(spec, 1, lambda _: Circumstances(("hot",), "it drifted"))
        assert retry.spoilt == spoilt
        assert len(retry.notes) == notes


SPEC = TrainSpec(model="llama-tiny")


def sound_launches(*outcomes: Launch | Failure) -> tuple[LaunchRetry, Callable[[], Launch]]:
    """What launches when each of ``outcomes`` comes in turn."""
    pending = iter(outcomes)
    launcher: Any = SimpleNamespace(launch=lambda _spec, _number, **_: next(pending))
    launches = LaunchRetry(launcher, lambda _: None)
    return launches, lambda: launches.launch(SPEC, 1, lambda _: Circumstances())


def failure(kind: str, *neighbours: str) -> Failure:
    return Failure(kind=kind, message="no", tail=(), folder="there", health=Health(foreign_processes=neighbours))


@pytest.fixture
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PAUSE_SECONDS", 0.0)


@pytest.mark.usefixtures("_no_pause")
class TestFailures:
    def test_memory_that_a_neighbour_held_is_asked_for_once_more(self, golden: Golden) -> None:
        launches, launch = sound_launches(failure("oom", "pid 7"), launch_of(SPEC))
        assert launch() == launch_of(SPEC)
        golden(launches.notes)
        assert launches.spoilt == ()

    def test_a_neighbour_that_stays_is_told(self, golden: Golden) -> None:
        launches, launch = sound_launches(failure("oom", "pid 7"), failure("oom", "pid 8"))
        with pytest.raises(LaunchFailed):
            launch()
        golden(launches.spoilt)

    @pytest.mark.parametrize("failed", [failure("oom"), failure("error", "pid 7"), failure("timeout", "pid 7")])
    def test_any_other_failure_is_its_own(self, failed: Failure) -> None:
        launches, launch = sound_launches(failed)
        with pytest.raises(LaunchFailed):
            launch()
        assert (launches.set_aside, launches.spoilt) == ((), ())
