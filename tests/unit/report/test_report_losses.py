"""``llmperf report --losses``: what trainings had learnt by when."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.cli import entry_point, main
from pytest_llmperf.insight.loss_in_time import STEPS, LossInTime, common_times
from pytest_llmperf.records.learning.learning import Learning
from pytest_llmperf.records.learning.replayed_update import ReplayedUpdate
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report import results_json
from tests.fakes import launch_of

SPEC = TrainSpec(model="llama-tiny", steps=20, min_steps=20)

STEPS_OF_ONE = st.lists(st.tuples(st.floats(0, 20), st.floats(0.001, 10)), min_size=1, max_size=40)


@given(STEPS_OF_ONE, st.floats(0, 400))
def test_a_loss_is_the_mean_of_the_last_steps_that_had_ended(steps: list[tuple[float, float]], at: float) -> None:
    losses, seconds = [loss for loss, _ in steps], [step for _, step in steps]
    curve = LossInTime.of(losses, seconds)
    ended = [loss for loss, end in zip(losses, accumulate(seconds), strict=True) if end <= at][-STEPS:]
    expected = fmean(ended) if ended and at <= curve.seconds else None
    assert curve.after(at) == (expected if expected is None else pytest.approx(expected))
    assert curve.last == pytest.approx(fmean(losses[-STEPS:]))


@given(st.lists(STEPS_OF_ONE, max_size=4))
def test_losses_are_told_while_all_trained(several: list[list[tuple[float, float]]]) -> None:
    curves = [LossInTime.of([loss for loss, _ in steps], [step for _, step in steps]) for steps in several]
    times = common_times(curves)
    assert times == sorted(times)
    assert bool(times) == bool(curves)
    shortest = min((curve.seconds for curve in curves), default=0.0)
    assert all(0 < at <= shortest * (1 + 1e-9) for at in times)
    if times:
        assert times[-1] > 0.9 * shortest


def test_a_loss_that_is_no_number_is_not_told() -> None:
    curve = LossInTime.of([1.0] * 9 + [math.nan], [1.0] * 10)
    assert (curve.last, curve.after(9.0)) == (None, 1.0)
    assert LossInTime.of([], []).last is None


def write(path: Path, *cases: tuple[str, Sequence[float], float, dict[str, Any]]) -> Path:
    """A run's results: each case by its id, losses, seconds of a step, and what else its metrics have."""
    results = []
    for name, losses, seconds, metrics in cases:
        launch = launch_of(SPEC)
        rank = replace(launch.ranks[0], step_seconds=(seconds,) * len(losses))
        launch = replace(launch, ranks=(rank,), losses=tuple(losses), evidence={**launch.evidence, "epochs": 1.5})
        values = {name: {"value": value} for name, value in metrics.items()}
        results.append({"id": name, "metrics": values, "launches": [launch.to_dict()]})
    path.write_text(json.dumps({"results": results}))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rates = {"tokens_per_second_per_gpu": 1000.0}
    real = {**rates, "real_tokens_per_second_per_gpu": 300.0}
    falling = [4.0 - 0.1 * step for step in range(20)]
    return write(tmp_path / "out.json", ("slow", falling, 2.0, rates), ("fast", falling, 0.5, real))


def report(*words: object) -> int:
    return entry_point.main(["report", "--losses", *map(str, words)])


def test_two_trainings_at_the_same_times(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(file, "--at", "10,5") == 0
    heading, slow, fast = capsys.readouterr().out.splitlines()[:3]
    assert heading.split("  ")[0] == "case"
    assert heading.index("loss after 5 s") < heading.index("loss after 10 s") < heading.index("last loss")
    # Two and five steps of the one, ten and twenty of the other.
    assert slow.split() == ["slow", "1,000", "-", "20", "40", "s", "1.50", "3.950", "3.800", "2.450"]
    assert fast.split() == ["fast", "1,000", "300", "20", "10", "s", "1.50", "3.450", "2.450", "2.450"]


def test_a_program_has_plain_numbers(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(file, "--format", "csv") == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["case"] for row in rows] == ["slow", "fast"]
    assert rows[1]["loss_after_10_s"] == "2.45"
    assert rows[0]["real_tokens_per_second_per_gpu"] == ""


def test_a_document_has_the_published_runs_beside_ours(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(file, "--format", "markdown") == 0
    out = capsys.readouterr().out
    assert "| slow |" in out
    assert "58,390" in out
    assert "0.3455" in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "not a --perf-json file"),
        ('{"results": [{"id": "a", "metrics": {}, "launches": [{}]}]}', "not a --perf-json file (a launch"),
        ('{"results": []}', "no case of it has a launch"),
        ("[" * 100_000, "not a --perf-json file"),
    ],
)
def test_a_file_that_cannot_serve_is_one_line_and_the_others_are_shown(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    assert report(bad, file) == 1
    out, err = capsys.readouterr()
    assert "slow" in out
    (line,) = err.splitlines()
    assert str(bad) in line
    assert said in line
    assert "expected what a run that launched wrote: name it in that run with --perf-json=FILE" in line


def test_a_training_that_went_wrong_is_shown_as_far_as_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = (replace(launch_of(SPEC).ranks[0], step_seconds=(1.0,) * 20),)
    launch = replace(
        launch_of(SPEC), ranks=ranks, losses=(2.0,) * 10 + (math.nan,) * 10, gradient_norms=(1.0, math.nan)
    )
    replay = ReplayedUpdate(tensors=20, roundings=math.inf, found=math.nan, counts=(5, 5))
    learning = Learning(tensors=20, gradient_norm=math.nan, clip_factors=(math.nan, 1.0), replay=replay)
    launch = replace(launch, learning=learning)
    result = CaseResult(
        id="lost", digest="", nodeid="", machine="", verdict="invalid", reason="no number", launches=(launch,)
    )
    path = tmp_path / "a.json"
    results_json.write_json(path, results_json.document({}, [result]))
    assert report(path, "--at", "10") == 0
    heading, row = capsys.readouterr().out.splitlines()[:2]
    assert row.split()[-2:] == ["2.000", "-"], heading
    assert main(["explain", f"{path}:lost"]) == 1
    assert "lost has no trace" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text", "markdown"])
def test_random_tokens_are_told_as_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = write(tmp_path / "a.json", ("drawn", [6.9] * 20, 1.0, {}), ("read", [2.0] * 20, 1.0, {}))
    document = json.loads(path.read_text())
    document["results"][1]["launches"][0]["evidence"]["data"] = {"num_rows": 8}
    path.write_text(json.dumps(document))
    assert report(path, "--format", kind) == 0
    out = capsys.readouterr().out
    assert "random tokens, of which nothing can be learnt: drawn; a text: data=text" in out.replace("\\", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--losses a.json --samples 10", "--samples says nothing to --losses"),
        ("--losses a.json --tokens 1B", "--tokens says nothing to --losses"),
        ("--tables --at 5", "--at says nothing to --tables"),
        ("--losses a.json --at 0", "expected seconds above 0"),
    ],
)
def test_options_that_say_nothing_here(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entry_point.main(["report", *words.split()])
    assert said in capsys.readouterr().err
