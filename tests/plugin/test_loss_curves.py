"""Loss curves as a test asks for them: marker, option and ini value, what they print, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import text_package
from tests.golden import Golden
from tests.plugin.conftest import Project

MARKED = """
import dataclasses, pytest

@pytest.mark.perf_loss_curve({arguments})
def test_it(perf, train_spec):
    perf.check(dataclasses.replace(train_spec, data="text", min_steps=train_spec.steps))
"""

SEEDS = {"seed43": {"loss": 6.05}, "seed44": {"loss": 5.95}, "seed45": {"loss": 6.02}, "seed46": {"loss": 5.98}}


@pytest.fixture(autouse=True)
def _texts_can_be_read(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    text_package.offer(project.path, monkeypatch)


def test_a_marked_case_is_recorded_judged_and_told(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(test_mine=MARKED.format(arguments=""))
    project.fake(loss=6.0, by=SEEDS)
    recorded = project.run("--update-baselines", "--perf-reason", "start")
    assert recorded.ret == 0
    golden.lines(recorded.stdout, "recorded loss curve")
    same = project.run()
    assert same.ret == 0
    golden.lines(same.stdout, "loss curve same:")
    project.fake(loss=9.0, by={name: {"loss": value["loss"] + 3} for name, value in SEEDS.items()})
    worse = project.run()
    assert worse.ret == 1
    golden.lines(worse.stdout, ": invalid: loss")


@pytest.mark.parametrize("how", ["--perf-loss-curve", "perf_loss_curve=true"])
def test_a_whole_run_may_ask_for_it(project: Project, how: str) -> None:
    project.pytester.makepyfile(test_mine=MARKED.format(arguments="").replace("@pytest.mark.perf_loss_curve()", ""))
    project.fake(loss=6.0, by=SEEDS)
    options = [how] if how.startswith("--") else ["-o", how]
    assert project.run(*options, "--update-baselines=new").ret == 0
    assert len(project.launches) == 5
    assert [path.parent.name for path in project.baselines].count("loss-curves") == 1
    # A curve of a case that is no more goes with it.
    Path(project.path / "test_mine.py").write_text("def test_other(perf, train_spec):\n    perf.check(train_spec)\n")
    project.run("--update-baselines=prune")
    assert project.baselines == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("7", "perf_loss_curve(7): must be given by name: seeds=…"),
        ("seeds=2", "perf_loss_curve(seeds=2): must be a number of seeds, 3 to 64"),
        ("steps=2", "perf_loss_curve(steps=2): unknown*known: seeds=…"),
    ],
)
def test_a_misused_marker_is_one_line(project: Project, arguments: str, said: str) -> None:
    project.pytester.makepyfile(test_mine=MARKED.format(arguments=arguments))
    result = project.run()
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*test_it: marker {said}"])


def test_nothing_is_launched_beside_it(project: Project, golden: Golden) -> None:
    result = project.run("--perf-static", "--perf-loss-curve")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "--perf-static launches nothing;")
