"""Which launches are told with what they pass, so that they may end sooner: those that alone decide a case."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from pytest_llmperf.judge.pairs import Bounds
from pytest_llmperf.launch import local
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.steady_state import PassingRanges
from pytest_llmperf.report.failure_message import failure_message
from pytest_llmperf.run.case import CaseTerms
from tests.engine.conftest import EAGER, SPEC, Engine
from tests.fakes import FakeLauncher
from tests.golden import Golden

HERE = [Place("host", "Fake CPU")]


@pytest.fixture
def told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[PassingRanges | None]:
    """What each launch since was told; one is stored."""
    found: list[PassingRanges | None] = []

    class Listening(FakeLauncher):
        def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
            found.append(request.passing)
            return super().launch(request, watch)

    engine.record(step_seconds=0.1)
    monkeypatch.setattr(local, "LocalLauncher", Listening)
    return found


def test_the_first_launch_of_a_case_with_a_baseline_knows_what_passes_here_and_elsewhere(
    engine: Engine, told: list[PassingRanges | None]
) -> None:
    engine.check(throughput_tolerance=0.5)
    (passing,) = told
    assert passing is not None
    assert passing.at(HERE).low < math.log(0.1) < passing.at(HERE).high < math.log(0.15)
    assert passing.at(HERE).high > passing.at([Place("other", "Fake CPU")]).high


def test_one_that_alone_decided_nothing_is_followed_by_launches_that_need_all_they_can_know(
    engine: Engine, told: list[PassingRanges | None]
) -> None:
    engine.fake(step_seconds=0.9)
    assert engine.check().result.verdict == "regressed"
    assert [passing is None for passing in told] == [False, True]


@pytest.mark.parametrize(
    "settings",
    [{"update": "all", "reason": "why"}, {"launches": 2}, {"against": "python"}],
    ids=["it is to be stored", "the run asks for more than one", "sides take turns"],
)
def test_no_launch_of_these_is_told_anything(
    engine: Engine, told: list[PassingRanges | None], settings: dict[str, Any]
) -> None:
    engine.check(**settings)
    assert told
    assert set(told) == {None}


def test_a_case_without_a_baseline_is_told_nothing_and_recording_new_ones_hurries_the_others(
    engine: Engine, told: list[PassingRanges | None]
) -> None:
    checks = engine.run(update="new")
    checks.check(EAGER)
    checks.check(SPEC)
    assert [passing is None for passing in told] == [True, False]


def test_whoever_computes_with_launches_gets_whole_ones(engine: Engine, told: list[PassingRanges | None]) -> None:
    engine.run().measure(SPEC)
    engine.run().compare(EAGER, SPEC, {"throughput": Bounds(at_least=0.5, of="throughput")})
    assert set(told) == {None}
    assert len(told) >= 3


def test_beside_a_floor_a_launch_is_told_less_where_a_wider_case_may_need_it(
    engine: Engine, told: list[PassingRanges | None]
) -> None:
    for has_floors in (False, True):
        checks = engine.run()
        checks._caller.run.has_floors = has_floors
        checks.check(SPEC)
    free, shared = told
    assert free is not None
    assert shared is not None
    assert shared.elsewhere.error < free.elsewhere.error


def test_one_that_drifted_is_tried_again_to_its_end(
    engine: Engine, told: list[PassingRanges | None], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    launch, growth = FakeLauncher.launch, [1.3]

    def drifting(self: FakeLauncher, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        made = launch(self, request, watch)
        assert isinstance(made, Launch)
        if len(told) > 1:
            return made
        steps = tuple(0.1 * growth[-1] ** number for number in range(request.spec.steps))
        return replace(made, ranks=tuple(replace(rank, step_seconds=steps) for rank in made.ranks))

    monkeypatch.setattr(FakeLauncher, "launch", drifting)
    of_a_cpu = engine.run().check(SPEC).result  # whose neighbours come and go
    assert of_a_cpu.verdict == "inconclusive"
    assert not [note for note in of_a_cpu.notes if "set aside" in note]
    told.clear()
    growth.append(1.1)
    result = engine.run(CaseTerms(tolerances={"tokens_per_second_per_gpu": 0.5})).check(SPEC).result
    golden(result.notes[0])
    assert [passing is None for passing in told] == [False, True]


def test_one_that_a_neighbour_spoilt_is_tried_again_as_it_was(engine: Engine, told: list[PassingRanges | None]) -> None:
    engine.fake(sequence=[{"foreign_processes": ["pid 7"]}, {}])
    assert engine.check().result.verdict == "pass"
    first, second = told
    assert first is not None
    assert first == second


# ---- which launches take all their steps -----------------------------------------------------------------------------


class Whole(FakeLauncher):
    """Ends after ten steps, unless it is to take all; some were told so, some lose time in each fifth step."""

    asked: ClassVar[list[bool]] = []
    stall: ClassVar[float] = 1.0

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        self.asked.append(request.all_steps)
        made = super().launch(request, watch)
        assert isinstance(made, Launch)
        (rank,) = made.ranks
        seconds = [each * (1.0 if step % 5 else self.stall) for step, each in enumerate(rank.step_seconds)]
        if request.all_steps:
            return replace(made, ranks=(replace(rank, step_seconds=tuple(seconds)),))
        short = replace(rank, step_seconds=tuple(seconds[:10]))
        return replace(made, ranks=(short,), losses=made.losses[:10], planned_steps=request.spec.steps)


@pytest.fixture
def whole(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> type[Whole]:
    monkeypatch.setattr(Whole, "asked", [])
    monkeypatch.setattr(local, "LocalLauncher", Whole)
    engine.record(step_seconds=0.1)
    return Whole


def test_a_recorded_launch_takes_all_its_steps_and_others_in_their_turn(engine: Engine, whole: type[Whole]) -> None:
    assert whole.asked == [True]
    for nights, expected in ((1, True), (0, False)):
        assert engine.check(all_steps=nights).result.verdict == "pass"
        assert whole.asked[-1] is expected


def test_a_verdict_of_an_early_end_says_how_much_was_seen(engine: Engine, whole: type[Whole], golden: Golden) -> None:
    result = engine.check(all_steps=0).result
    assert whole.asked[-1] is False
    golden(result.reason)
    golden.lines(result.notes, "10 of 20")
    golden.lines(failure_message(result, "", ""), "note: 10 of")
    assert not [note for note in engine.check(all_steps=1).result.notes if "seen" in note]


def test_what_a_short_launch_has_too_much_of_a_whole_one_has_to_show(
    engine: Engine, whole: type[Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "stall", 2.0)
    terms = CaseTerms(tolerances={"stall_share": 0.02})
    assert engine.run(terms, all_steps=0).check(SPEC).result.verdict == "regressed"
    assert whole.asked[1:] == [False, True]
