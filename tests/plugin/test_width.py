"""A night runs each width by itself: which tests are of it, whatever they are called, and what is left is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_llmperf.cli import night_results
from tests.golden import Golden
from tests.plugin.conftest import Project

TESTS = """
import pytest
from pytest_llmperf import TrainSpec

def spec(**fields):
    return TrainSpec(model="llama-tiny", sequence_length=64, steps=20, min_steps=20, **fields)

@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention(perf, attention):
    perf.check(spec(attention=attention))

def test_wide(perf):
    perf.check(spec(gpus=2))

def test_series(perf):
    for gpus in (1, 2):
        perf.check(spec(gpus=gpus, micro_batch_size=2))

def test_asked_for_late(request):
    request.getfixturevalue("perf").check(spec(gpus=2, micro_batch_size=3))

def test_figures(perf):
    rate = perf.measure(spec(micro_batch_size=4))[0].wall_seconds
    perf.check(spec(micro_batch_size=5, gpus=2 if rate else 1))

def test_three(perf):
    perf.check(spec(gpus=3))

@pytest.mark.skip(reason="not today")
def test_not_today(perf):
    pass

def test_plain():
    pass
"""


@pytest.fixture
def night(project: Project) -> Project:
    project.pytester.makepyfile(test_mine=TESTS)
    project.run("--update-baselines=new", "-q")
    (project.path / "night").mkdir()
    return project


def plan(night: Project) -> None:
    night.run("--perf-dry-run", "--perf-json", "night/plan.json")


def at_width(night: Project, width: int, *options: str) -> tuple[set[str], dict[str, Any]]:
    """The tests that were measured there, and all that its results say."""
    file = f"night/gpus-{width}.json"
    night.run("--perf-width", str(width), "--perf-json", file, *options)
    document = json.loads((night.path / file).read_text())
    return {result["nodeid"].partition("::")[2] for result in document["results"]}, document


PLANNED = ("--perf-plan", "night/plan.json")


def test_each_test_runs_at_the_width_of_its_widest_spec_and_the_night_names_what_ran_nowhere(
    night: Project, golden: Golden
) -> None:
    plan(night)
    narrow, _ = at_width(night, 1, *PLANNED)
    wide, _ = at_width(night, 2, *PLANNED)
    assert narrow == {"test_attention[sdpa]", "test_attention[eager]"}
    assert wide == {"test_wide", "test_series", "test_asked_for_late"}
    found = night_results.gather([night.path / "night"], [])
    golden([line for line in found.troubles if "not judged" in line])
    golden(found.notes)


def test_without_a_plan_the_first_spec_decides(night: Project, golden: Golden) -> None:
    narrow, _ = at_width(night, 1)
    wide, document = at_width(night, 2)
    assert narrow == {"test_attention[sdpa]", "test_attention[eager]", "test_series"}
    assert wide == {"test_wide", "test_asked_for_late"}
    reasons = {case["nodeid"].partition("::")[2]: case["reason"] for case in document["skipped"]}
    golden(reasons["test_three"])
    troubles = "\n".join(night_results.gather([night.path / "night"], []).troubles)
    golden.lines(
        troubles,
        "test_mine.py::test_series (llama-tiny-bf16-sdpa-seq64-mbs2-gpus2): asked",
        "test_three (llama-tiny-bf16-sdpa-seq64-mbs1-gpus3): asks",
    )


def test_baselines_that_no_width_has_are_found_by_all_of_them_together(night: Project) -> None:
    # Those of which no width can know all that they run.
    unsure = ("test_series", "test_figures", "test_not_today")
    kept = [
        part
        for part in TESTS.replace('["sdpa", "eager"]', '["sdpa"]').split("\n\n")
        if not any(map(part.__contains__, unsure))
    ]
    night.pytester.makepyfile(test_mine="\n\n".join(kept))
    plan(night)
    for width in (1, 2, 3):
        measured, document = at_width(night, width, "--perf-strict")
        assert (len(measured), document["exit_code"]) == (2 if width == 2 else 1, 0)
    found = night_results.gather([night.path / "night"], [])
    lines = [line for line in found.troubles if "unused" in line]
    of = [
        line.partition(".json (no case of any width has its settings")[0].rpartition("llama-tiny-bf16-")[2]
        for line in lines
    ]
    assert of == [
        "eager-seq64-mbs1-gpus1",
        *("sdpa-seq64-mbs2-gpus1", "sdpa-seq64-mbs2-gpus2", "sdpa-seq64-mbs5-gpus2"),
    ]


def test_of_a_plan_that_stopped_early_nothing_is_left_out_that_it_does_not_know(night: Project) -> None:
    (night.path / "test_a.py").write_text("def test_that_fails():\n    assert False\n")
    night.run("--perf-dry-run", "-x", "--perf-json", "night/plan.json")
    wide, _ = at_width(night, 2, *PLANNED)
    assert "test_asked_for_late" in wide


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--perf-plan", "x.json"], "--perf-plan tells which tests are of a width; it goes with --perf-width"),
        (["--perf-width", "1", "--perf-plan", "x.json"], "*x.json: not a plan (*No such file*"),
        (["--perf-width", "0"], "*--perf-width*a number of GPUs, 1 or more*"),
    ],
)
def test_what_makes_no_sense_is_refused(project: Project, options: list[str], said: str) -> None:
    result = project.run(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{said}*"])


def test_a_file_that_cannot_be_collected_is_no_interruption(night: Project, golden: Golden) -> None:
    (night.path / "test_broken.py").write_text("def test_(:\n")
    _, document = at_width(night, 1)
    assert (document["exit_code"], "unfinished" in document) == (pytest.ExitCode.INTERRUPTED, False)
    (night.path / "night" / "gpus-1.exit").write_text("2\n\n")
    troubles = night_results.gather([night.path / "night"], []).troubles
    golden.lines(troubles, "gpus-1.json: pytest ended")
