"""How far a run is, and the time that is left, by the baselines of its cases."""

from __future__ import annotations

import time

import pytest

from pytest_llmperf.plugin.items import RunProgress
from pytest_llmperf.records.failure import Progress
from pytest_llmperf.report.text import Numbered, live_line
from tests.golden import Golden


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def test_what_is_left_is_what_baselines_took_as_this_run_takes_longer_or_not(now: list[float], golden: Golden) -> None:
    run = RunProgress({"a": 10.0, "b": 20.0, "c": 30.0})
    assert run.whole == "about 60 s"
    assert run.line == ""
    run.begin("a")
    golden(run.line)
    now[0] += 4
    golden(run.line)
    now[0] += 1
    run.end("a")
    run.begin("b")  # the first took half of what it took before, so the others are expected to
    golden(run.line)
    now[0] += 40  # longer than expected: it is over at any moment
    golden(run.line)


def test_imports_that_the_first_case_waits_for_lengthen_no_other(now: list[float], golden: Golden) -> None:
    run = RunProgress({"a": 3.0, "b": 3.0, "c": 3.0})
    run.begin("a")
    now[0] += 15
    run.end("a")
    run.begin("b")
    golden(run.line)
    now[0] += 6
    run.end("b")
    run.begin("c")  # what the second took longer, the third is expected to
    golden(run.line)


def test_a_case_without_a_baseline_takes_as_long_as_the_others(now: list[float], golden: Golden) -> None:
    run = RunProgress({"a": None, "b": 20.0, "c": None})
    golden(run.whole)
    run.begin("a")
    golden(run.line)


def test_where_no_baseline_tells_the_run_itself_does(now: list[float], golden: Golden) -> None:
    run = RunProgress({"a": None, "b": None})
    assert run.whole == ""
    run.begin("a")
    assert run.line == "case 1 of 2"
    now[0] += 7
    run.end("a")
    run.begin("b")
    golden(run.line)


def test_other_tests_and_a_case_alone_say_nothing(now: list[float]) -> None:
    run = RunProgress({"a": 10.0, "b": 10.0})
    run.begin("no case")
    assert run.line == ""
    run.end("no case")
    alone = RunProgress({"a": 10.0})
    alone.begin("a")
    assert alone.line == ""


def test_the_line_of_a_launch_has_it_where_there_is_room(golden: Golden) -> None:
    launch, progress = Numbered("llama-tiny-bf16", 1, 2), Progress(phase="importing")
    run = "case 7 of 19, about 2 min left"
    golden(live_line(launch, progress, 3.0, 100, run=run))
    golden(live_line(launch, progress, 3.0, 45, run=run))
