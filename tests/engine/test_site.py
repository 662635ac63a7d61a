"""A place to launch in that the package does not know: the engine asks it, and nothing else, where its launches go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import pytest

from pytest_llmperf.launch import local, machine
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.launch.site import OutOfTimeError, Say, Site
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.cases import Cases
from pytest_llmperf.run.findings import CannotRunError, RunEndedError
from pytest_llmperf.run.run import Run
from tests.engine.conftest import SPEC, Engine
from tests.fakes import FakeLauncher
from tests.golden import Golden


class Pods:
    """Another scheduler's; a launch of each spec says there where it ran."""

    is_here, key, restarts = False, "", 0
    where, for_more = "in the cluster", "ask for more pods"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_over = False

    def machine(self) -> Machine:
        return Machine(gpus=(), cpu_name="Pod", cores=8)

    def prepare(self, pythons: Sequence[str], *, on_cpu: bool) -> None:
        self.asked.append("prepare")

    def warm_start(self, _say: Say) -> None: ...

    @contextmanager
    def lease(self, *_: object, **__: object) -> Iterator[tuple[Gpu, ...]]:
        self.asked.append("lease")
        yield ()

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None], say: Say) -> Launch | Failure:
        self.asked.append("launch")
        if self.is_over:
            raise OutOfTimeError("the namespace's quota is used up")
        say("a pod began")
        return FakeLauncher().launch(request, watch)

    def sizes(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError

    def training_errors(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError

    def bad_ends(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Pods:
    found = Pods()
    site: Site = found  # mypy holds that it is one
    monkeypatch.setattr(Run, "site", property(lambda _: site))

    def not_here(*_: object, **__: object) -> None:
        raise AssertionError("this machine was asked")

    for module, name in ((local, "LocalLauncher"), (machine, "lease_cpu"), (machine, "lease_gpus")):
        monkeypatch.setattr(module, name, not_here)
    return found


def test_a_case_is_launched_where_the_site_says(engine: Engine, pods: Pods) -> None:
    engine.fake(loss=6.0)
    assert engine.check().result.verdict == "new"
    assert pods.asked == ["lease", "launch"]
    assert "a pod began" in engine.heard.said


def test_a_site_without_time_ends_the_run(engine: Engine, pods: Pods, golden: Golden) -> None:
    engine.fake(loss=6.0)
    pods.is_over = True
    with pytest.raises(RunEndedError) as ended:
        engine.check()
    golden(ended)
    assert ended.value.exit_code == 75


def test_small_trainings_are_refused_where_launches_are_not_here(engine: Engine, pods: Pods) -> None:
    checks: Cases = engine.run()
    with pytest.raises(CannotRunError, match="this machine alone"):
        checks.same_training(SPEC)
    assert pods.asked == []


def test_a_job_is_one_also_where_its_launches_start_on_its_own_node(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert engine.caller(gpus=0).run.in_job is False
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert engine.caller(gpus=0, launcher="local").run.in_job is True
