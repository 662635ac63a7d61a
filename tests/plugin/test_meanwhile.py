"""Recording where another run changes the baseline while this one measures: the launches are judged against it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

_CONFTEST = """
import shutil
from pathlib import Path
from unittest import mock

from pytest_llmperf.launch import local
from tests import fakes

fakes.install()

class Meanwhile(fakes.FakeLauncher):
    def launch(self, request, watch):
        launch = super().launch(request, watch)
        if Path("meanwhile").exists():
            shutil.rmtree("baselines", ignore_errors=True)
            Path("meanwhile").rename("baselines")
        return launch

mock.patch.object(local, "LocalLauncher", Meanwhile).start()
"""

_TEST = "def test_it(perf, train_spec):\n    perf.{method}(train_spec)\n"
UPDATE = ("--update-baselines", "--perf-memory-limit", "2GiB")


@pytest.fixture
def run(project: Project) -> Project:
    project.pytester.makeconftest(_CONFTEST)
    project.pytester.makepyfile(test_mine=_TEST.format(method="check"))
    return project


def another(project: Project, **values: Any) -> None:
    """What another run will have recorded by the end of the next launch."""
    had = project.path / "had"
    if project.baselines:
        (project.path / "baselines").rename(had)
    project.fake(**values)
    assert project.run(*UPDATE).ret == 0
    (project.path / "baselines").rename(project.path / "meanwhile")
    (project.path / "launches.txt").unlink()
    if had.exists():
        had.rename(project.path / "baselines")


def recorded(project: Project) -> list[float]:
    """The step times of the stored launches."""
    (path,) = project.baselines
    return [launch["ranks"][0]["step_seconds"][-1] for launch in json.loads(path.read_text())["launches"]]


def test_launches_of_the_same_speed_join_what_it_recorded(run: Project) -> None:
    another(run, step_seconds=0.1)
    run.fake(step_seconds=0.101)
    (result,) = run.results(*UPDATE).values()
    assert (result["verdict"], len(run.launches), recorded(run)) == ("pass", 1, [0.1, 0.101])


def test_where_only_new_ones_are_recorded_it_is_held_against_and_stays(run: Project) -> None:
    another(run, step_seconds=0.1)
    run.fake(step_seconds=0.101)
    (result,) = run.results("--update-baselines=new", *UPDATE[1:]).values()
    assert (result["verdict"], len(run.launches), recorded(run)) == ("pass", 1, [0.1])


def test_a_loss_against_it_is_told_as_one(run: Project) -> None:
    another(run, step_seconds=0.1)
    run.fake(step_seconds=3.0)
    (result,) = run.results(*UPDATE).values()
    assert (result["verdict"], recorded(run)) == ("regressed", [0.1])
    assert len(run.launches) == 2  # one launch alone condemns nobody, here as elsewhere


def test_a_launch_that_was_set_aside_is_still_told(run: Project, golden: Golden) -> None:
    another(run, step_seconds=0.1)
    run.fake(sequence=[{"foreign_processes": ["pid 7"]}, {}])
    (result,) = run.results(*UPDATE).values()
    assert result["verdict"] == "pass"
    golden.lines(result["notes"], "one launch was")


def test_one_that_it_removed_is_recorded_anew(run: Project) -> None:
    another(run, step_seconds=0.1)
    (run.path / "meanwhile").rename(run.path / "baselines")
    (run.path / "meanwhile").mkdir()
    (result,) = run.results(*UPDATE).values()
    assert (result["verdict"], recorded(run)) == ("new", [0.1])


def test_one_that_cannot_be_read_refuses_the_recording(run: Project) -> None:
    another(run)
    (path,) = (run.path / "meanwhile").rglob("*.json")
    path.write_text("{")
    run.run(*UPDATE).assert_outcomes(failed=1)
    assert run.baselines[0].read_text() == "{"


@pytest.mark.parametrize(
    ("options", "most", "verdict", "sizes"),
    [
        (UPDATE, 12, "pass", [12.0, 12.0]),
        (UPDATE, 8, "regressed", [12.0]),
        (("--update-baselines=new", *UPDATE[1:]), 12, "pass", [12.0]),
    ],
)
def test_a_largest_micro_batch_is_judged_against_it_too(
    run: Project, options: tuple[str, ...], most: int, verdict: str, sizes: list[float]
) -> None:
    run.pytester.makepyfile(test_mine=_TEST.format(method="max_micro_batch"))
    another(run, most=12)
    run.fake(most=most)
    (result,) = run.results(*options).values()
    history = json.loads(run.baselines[0].read_text())["history"]
    assert result["verdict"] == verdict
    assert [entry["metrics"]["max_micro_batch_size"] for entry in history] == sizes
