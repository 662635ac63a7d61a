"""Where the seconds of a launch went, from what its rank 0 and its launcher told."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.launch import watch
from pytest_llmperf.launch.watch import Lap, Meter, ProgressReader, with_phases
from pytest_llmperf.observe.vital_signs import Heartbeat
from pytest_llmperf.records.failure import FAILED, HELD, OTHER, WAITING, Progress, accounted, phases_of, summed, total
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.fakes import launch_of

REPOSITORY = Path(__file__).parents[3]
SPEC = TrainSpec(model="llama-tiny", steps=10)
BEGAN = 1.7e9
REACHED = {"importing": BEGAN + 2.0, "building": BEGAN + 9.5, "training": BEGAN + 11.0, "finishing": BEGAN + 20.0}
WORDS = (
    "importing",
    "building",
    "calibrating",
    "assembling",
    "training",
    "gathering",
    "tracing",
    "finishing",
    "nonsense",
)


class TestOfALaunch:
    def test_each_lasts_until_the_next_begins(self) -> None:
        assert phases_of(BEGAN, 21.5, REACHED, 3.25) == {
            "start": 2.0,
            "imports": 7.5,
            "model": 1.5,
            "first_step": 3.25,
            "steps": 5.75,
            "end": 1.5,
        }

    def test_traced_steps_are_one_of_their_own(self) -> None:
        phases = phases_of(BEGAN, 21.5, {**REACHED, "tracing": BEGAN + 19.0}, 3.25)
        assert (phases["steps"], phases["trace"], phases["end"]) == (4.75, 1.0, 1.5)

    def test_a_calibration_is_no_part_of_the_models(self) -> None:
        told = {**REACHED, "calibrating": BEGAN + 9.75, "assembling": BEGAN + 10.5}
        phases = phases_of(BEGAN, 21.5, told, 3.25)
        assert (phases["imports"], phases["calibration"], phases["model"]) == (7.5, 0.75, 0.75)
        assert "calibration" not in HELD
        kept = {name: at for name, at in told.items() if name != "calibrating"}
        assert phases_of(BEGAN, 21.5, kept, 3.25) == phases_of(BEGAN, 21.5, REACHED, 3.25)

    def test_what_is_gathered_before_the_traced_steps_belongs_to_the_end(self) -> None:
        after = {"gathering": BEGAN + 24.0, "tracing": BEGAN + 24.5, "finishing": BEGAN + 25.0}
        phases = phases_of(BEGAN, 26.5, {**REACHED, **after}, 3.25)
        assert list(phases)[4:] == ["steps", "trace", "end"]
        assert [phases[name] for name in ("trace", "end")] == [0.5, 2.0]

    def test_the_documentation_names_them_in_their_order(self) -> None:
        page = (REPOSITORY / "docs" / "explanation" / "measurement.md").read_text(encoding="utf-8")
        every = {**REACHED, "gathering": BEGAN + 21.0, "tracing": BEGAN + 21.5}
        every |= {"calibrating": BEGAN + 10.0, "assembling": BEGAN + 10.5}
        table = page.partition("## Where the time went")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [WAITING, *phases_of(BEGAN, 25.5, every, 3.25)]

    def test_nothing_is_made_up_where_rank_0_told_nothing(self) -> None:
        assert phases_of(BEGAN, 21.5, {}, 3.25) == {}

    def test_what_an_old_word_of_it_leaves_out_is_part_of_what_came_before(self) -> None:
        early = {name: at for name, at in REACHED.items() if name != "finishing"}
        assert phases_of(BEGAN, 21.5, early, 3.25)["steps"] == 7.25

    @pytest.mark.parametrize("hours", [-1, 1])
    def test_another_hosts_clock_moves_boundaries_no_further_than_the_ends(self, hours: int) -> None:
        skewed = {name: at + 3600 * hours for name, at in REACHED.items()}
        phases = phases_of(BEGAN, 21.5, skewed, 3.25)
        assert phases["start" if hours > 0 else "end"] == 21.5
        assert total(phases) == 21.5

    @given(
        st.dictionaries(st.sampled_from(WORDS), st.floats(-1e6, 1e6).map(lambda at: BEGAN + at)),
        st.floats(0, 1e6),
        st.floats(0, 1e6),
    )
    def test_none_is_negative_and_they_add_up(
        self, reached: dict[str, float], seconds: float, first_step_seconds: float
    ) -> None:
        phases = phases_of(BEGAN, seconds, reached, first_step_seconds)
        assert all(each >= 0 for each in phases.values())
        assert not phases or total(phases) == pytest.approx(seconds, abs=0.002)

    def test_a_record_is_timed_by_its_launcher(self) -> None:
        launch = with_phases(launch_of(SPEC), Lap(BEGAN, 21.50004), Progress(phase="finishing", reached=REACHED))
        assert launch.wall_seconds == 21.5 == total(launch.phases)
        assert launch.phases["first_step"] == launch.first_step_seconds


class TestOfARun:
    def test_a_record_tells_its_own(self) -> None:
        record = {WAITING: 3.0, "start": 2.0, "steps": 8.0}
        assert accounted(record, 3.0, 10.001, FAILED) == record

    def test_what_a_record_does_not_tell_goes_by_another_name(self) -> None:
        assert accounted({"start": 2.0, "steps": 8.0}, 3.0, 14.0, FAILED) == {
            WAITING: 3.0,
            "start": 2.0,
            "steps": 8.0,
            FAILED: 4.0,
        }
        assert accounted({}, 3.0, 14.0, OTHER) == {WAITING: 3.0, OTHER: 14.0}

    def test_they_are_added_one_by_one(self) -> None:
        assert summed([{"start": 1.0, "steps": 2.0}, {}, {"steps": 0.5, "end": 1.0}]) == {
            "start": 1.0,
            "steps": 2.5,
            "end": 1.0,
        }


class TestTold:
    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        clock = SimpleNamespace(seconds=BEGAN)
        monkeypatch.setattr(time, "time", lambda: clock.seconds)
        return clock

    def test_a_rank_tells_when_it_came_to_what_and_how_long_it_is_at_it(
        self, tmp_path: Path, now: SimpleNamespace
    ) -> None:
        words: Any = None  # a rank that does not end has no last ones
        beat = Heartbeat(tmp_path, 0, words)
        for phase, seconds in (("building", 2.0), ("building", 1.0), ("training", 1.0)):
            now.seconds += seconds
            beat.enter(phase)
        now.seconds += 12.0
        beat.compiles = True
        beat.write()
        told = ProgressReader(tmp_path / "progress.json", lambda _: None).read()
        assert told.reached == {"importing": BEGAN, "building": BEGAN + 2.0, "training": BEGAN + 4.0}
        assert (told.phase, told.phase_seconds, told.compiles, told.trained_until) == ("training", 12.0, True, 0.0)
        beat.enter("finishing")
        beat.write()
        assert ProgressReader(tmp_path / "progress.json", lambda _: None).read().trained_until == BEGAN + 16.0

    @pytest.mark.parametrize("reached", [None, [], {"training": None}, {"training": "x"}, {"training": float("nan")}])
    def test_a_broken_word_is_no_news(self, tmp_path: Path, reached: object) -> None:
        beat = {"phase": "training", "step": 1, "steps": 2, "time": 1.0, "reserved_bytes": 0, "tokens_per_step": 1}
        (tmp_path / "progress.json").write_text(json.dumps({**beat, "compiles": False, "reached": reached}))
        assert ProgressReader(tmp_path / "progress.json", lambda _: None).read() == Progress(phase="starting")

    def test_a_meter_counts_the_wait_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter([10.0, 15.0, 20.0, 22.0])
        monkeypatch.setattr(watch, "time", SimpleNamespace(time=time.time, monotonic=lambda: next(clock)))
        meter = Meter()
        with meter.waiting():
            pass
        with meter.running() as lap:
            pass
        assert (meter.waited_seconds, meter.seconds, lap.seconds) == (5.0, 2.0, 2.0)
        assert abs(lap.began - time.time()) < 10


class TestKept:
    LAUNCH = replace(launch_of(SPEC), phases={"start": 1.0, "steps": 2.0})

    def test_a_record_keeps_them_and_an_old_one_has_none(self) -> None:
        values = codec.plain(self.LAUNCH)
        assert codec.read(Launch, json.loads(json.dumps(values))).phases == {"start": 1.0, "steps": 2.0}
        assert "phases" not in codec.plain(launch_of(SPEC))
        assert codec.read(Launch, {**values, "phases": {}}).phases == {}


def test_what_has_made_no_step_has_trained_for_no_time() -> None:
    begun = Progress(phase="training", reached={"training": 100.0})
    assert begun.trained_seconds == 0.0
    assert replace(begun, step=1, stepped=104.0).trained_seconds == 4.0
