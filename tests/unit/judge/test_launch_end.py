"""When a launch may end, and what the judge says of that before it begins."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy, passing_ranges
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import measured
from pytest_llmperf.records.steady_state import (
    DECIDED,
    ENOUGH,
    GOES_ON,
    KNOWN,
    PassingRange,
    PassingRanges,
    find_steady,
    looks,
    why_end,
)
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.fakes import Fake, launch_of
from tests.shelf import baseline_at
from tools.launch_ends import RULES, Ending, stored
from tools.verdicts import read, replay

DATA = Path(__file__).parents[3] / "docs" / "data"
BASELINES = Path(__file__).parents[3] / "baselines" / "nvidia-h200-140gib"

SPEC = TrainSpec(model="llama-tiny", sequence_length=64)
WIDE = PassingRange(low=math.log(0.1), high=math.log(0.4), error=0.1, drift=0.1)
GPU = Policy.for_gpu()


def noisy(number: int = 60, spread: float = 0.004, seed: int = 1, level: float = 0.2) -> list[float]:
    source = random.Random(seed)
    return [5 * level, *(level * math.exp(source.gauss(0, spread)) for _ in range(number - 1))]


def steps_taken(times: Sequence[float], passing: PassingRange | None, least: int = 16) -> int:
    return next((step for step in looks(least, len(times)) if why_end(times[:step], 4, passing)), len(times))


#: About 0.2 s, and anywhere.
PASSING = st.builds(
    PassingRange,
    low=st.floats(math.log(0.2) - 1, math.log(0.2) + 0.5),
    high=st.floats(math.log(0.2) - 0.5, math.log(0.2) + 1),
    error=st.floats(0.0, 0.1),
    drift=st.floats(0.0, 0.1),
    stalls=st.floats(0.0, 1.0),
    steps=st.integers(0, 40),
)


class TestWhyEnd:
    def test_looks_grow_apart_and_none_is_the_last_step(self) -> None:
        assert looks(16, 60) == [16, 20, 24, 28, 32, 36, 40, 45, 50, 56]
        assert looks(16, 16) == []
        assert looks(20, 12) == []
        assert len(looks(16, 10_000)) < 80

    def test_a_median_that_is_known_ends_a_launch_whatever_passes(self) -> None:
        nowhere = replace(WIDE, low=0.0, high=0.0)
        assert [why_end(noisy(30, 0.001), 4, passing) for passing in (None, nowhere, WIDE)] == [KNOWN] * 3

    def test_one_that_is_far_from_every_limit_ends_it_sooner(self) -> None:
        times = noisy(spread=0.02)
        assert steps_taken(times, None) == 60
        assert steps_taken(times, WIDE) == 16
        assert why_end(times[:16], 4, WIDE) == DECIDED

    @pytest.mark.parametrize(
        "narrower",
        [
            {"high": math.log(0.2) + 0.02},
            {"low": math.log(0.2) - 0.02},
            {"low": math.log(0.3)},
            {"high": math.log(0.15)},
            {"error": 0.003},
            {"drift": 1e-6},
            {"stalls": -1.0},
            {"steps": 17},
        ],
    )
    def test_near_a_limit_or_beyond_it_a_launch_goes_on(self, narrower: dict[str, Any]) -> None:
        assert why_end(noisy(spread=0.02)[:16], 4, replace(WIDE, **narrower)) == GOES_ON

    def test_what_drifts_may_drift_on(self) -> None:
        times = [0.2 * math.exp(0.003 * step) for step in range(16)]
        steady = find_steady(times, 4)
        assert steady.drift > 0.01
        reach = 4 * steady.error + steady.drift
        middle = math.log(median(times[steady.start :]))
        assert why_end(times, 4, replace(WIDE, high=middle + reach + 0.002)) == DECIDED
        assert why_end(times, 4, replace(WIDE, high=middle + reach - 0.002)) == GOES_ON

    @pytest.mark.parametrize("broken", [math.nan, 0.0, -1.0, math.inf])
    def test_what_was_not_timed_decides_nothing(self, broken: float) -> None:
        assert why_end([*noisy()[:16], broken], 4, WIDE) == GOES_ON

    @pytest.mark.parametrize("number", range(5))
    def test_a_launch_that_only_warmed_up_says_nothing(self, number: int) -> None:
        assert why_end([0.2] * number, 4, WIDE) == GOES_ON

    def test_one_that_is_issued_counts_where_steps_have_to_be_enough(self) -> None:
        times = [5.0, 1.1, 1.1005, 1.1002, 1.1004]
        assert [why_end(times, 1, coming=coming) for coming in (0, 1)] == [GOES_ON, KNOWN]
        wide = replace(WIDE, low=0.0, high=0.2, steps=6)
        wider = [5.0, 1.1, 1.12, 1.09, 1.11]
        assert [why_end(wider, 1, wide, coming) for coming in (0, 1)] == [GOES_ON, DECIDED]
        assert why_end(wider, 1, replace(wide, steps=7), 1) == GOES_ON

    @given(st.integers(0, 10**6), st.floats(0.0001, 0.1), PASSING, st.integers(5, 60))
    def test_what_passes_never_makes_a_launch_longer_nor_ends_it_before_its_least(
        self, seed: int, spread: float, passing: PassingRange, least: int
    ) -> None:
        times = noisy(spread=spread, seed=seed)
        assert least <= steps_taken(times, passing, least) <= steps_taken(times, None, least)


PLACE = Place("host", "Fake CPU")


class TestPassingRanges:
    def test_they_cross_to_the_worker_as_plain_values(self) -> None:
        ranges = PassingRanges({"a": WIDE}, {"b": replace(WIDE, low=-3.0)}, replace(WIDE, high=3.0))
        assert codec.read(PassingRanges, json.loads(json.dumps(codec.plain(ranges)))) == ranges

    def test_the_very_hardware_comes_before_its_host_and_that_before_elsewhere(self) -> None:
        named = [replace(WIDE, high=float(number)) for number in range(3)]
        ranges = PassingRanges({"host Fake CPU": named[0]}, {"host": named[1]}, named[2])
        places = (PLACE, replace(PLACE, device="another CPU"), replace(PLACE, host="elsewhere"))
        assert [ranges.at([place]) for place in places] == named
        assert ranges.at([PLACE, PLACE]) == named[1]


def of(launches: Sequence[Launch]) -> Baseline:
    baseline = baseline_at(SPEC, 1000.0)
    entry = replace(baseline.anchor, launches=len(launches))
    return replace(baseline, launches=tuple(launches), anchor=entry, history=(entry,))


def launch(seconds: float = 0.2, host: str = "host", day: int = 1, steps: Sequence[float] = ()) -> Launch:
    made = launch_of(SPEC, Fake(step_seconds=seconds))
    times = tuple(steps) or made.ranks[0].step_seconds
    ranks = tuple(replace(rank, host=host, step_seconds=times) for rank in made.ranks)
    return replace(made, ranks=ranks, losses=(6.0,) * len(times), started_at=f"2026-01-{day:02d}T00:00:00Z")


def ranges(baseline: Baseline, policy: Policy = GPU, **kwargs: bool) -> PassingRanges:
    found = passing_ranges(baseline, policy, "2026-01-09", **kwargs)
    assert found is not None
    return found


class TestForesight:
    BASELINE = of([launch(0.2, "a", day) for day in (1, 1, 2)] + [launch(0.203, "b", 3)])

    def test_a_gate_that_sees_little_lets_launches_end_and_one_that_sees_much_does_not(self) -> None:
        here, there = ranges(self.BASELINE).at_sites["a Fake CPU"], ranges(self.BASELINE).elsewhere
        assert here.high - here.low < there.high - there.low < 2 * math.log(1.05)
        assert here.error < there.error
        assert there.error > 2 * ENOUGH

    @given(st.floats(-0.06, 0.06), st.sampled_from(["a", "b", "new"]))
    def test_whoever_ends_in_the_range_passes_and_whoever_passes_is_in_it(self, log: float, host: str) -> None:
        seconds = 0.2 * math.exp(log)
        passing = ranges(self.BASELINE).at([Place(host, "Fake CPU")])
        judgement = judge([launch(seconds, host, 9)], self.BASELINE, GPU)
        inside = passing.low < math.log(seconds) < passing.high
        passes = judgement.verdict == "pass" and not judgement.undecided
        assert (
            inside == passes or min(abs(passing.low - math.log(seconds)), abs(passing.high - math.log(seconds))) < 1e-9
        )

    @given(st.floats(-0.05, 0.05), st.integers(0, 10**6), st.floats(0.001, 0.03), st.sampled_from(["a", "new"]))
    def test_a_launch_that_ended_by_it_passes_as_it_is(self, log: float, seed: int, spread: float, host: str) -> None:
        passing = ranges(self.BASELINE).at([Place(host, "Fake CPU")])
        times = noisy(60, spread, seed, 0.2 * math.exp(log))
        steps = steps_taken(times, passing)
        if why_end(times[:steps], 4, passing) == DECIDED:
            judgement = judge([launch(host=host, day=9, steps=times[:steps])], self.BASELINE, GPU)
            assert (judgement.verdict, judgement.undecided) == ("pass", False)

    def test_other_cases_that_compute_with_a_launch_get_what_its_scatter_lets_them_know(self) -> None:
        shared = ranges(self.BASELINE, is_shared=True)
        assert shared.elsewhere.error == GPU.noise.launch.sd < ranges(self.BASELINE).elsewhere.error
        assert (shared.elsewhere.low, shared.elsewhere.high) == (
            ranges(self.BASELINE).elsewhere.low,
            ranges(self.BASELINE).elsewhere.high,
        )

    def test_stalls_that_would_cost_another_launch_go_on(self) -> None:
        assert ranges(self.BASELINE).elsewhere.stalls == 0.005
        assert ranges(self.BASELINE, Policy.for_cpu()).elsewhere.stalls == 1.0

    def test_what_took_others_long_to_be_steady_takes_half_as_long_again_to_be_believed(self) -> None:
        slow = [0.19] * 20 + [0.2 * math.exp(0.001 * (-1) ** number) for number in range(40)]
        baseline = of([launch(steps=slow), launch(steps=slow, day=2)])
        start = baseline.launches[0].steady.start
        assert start >= 20
        assert ranges(baseline).elsewhere.steps == math.ceil(1.5 * start)
        # A chip that is cool looks like one that passes.
        assert (
            steps_taken([0.19 * (1 + 0.02 * (-1) ** number) for number in range(60)], ranges(baseline).elsewhere) > 28
        )

    @pytest.mark.parametrize(
        "policy", [GPU.merged({"final_loss": 0.01}), replace(GPU, tolerances={"peak_reserved_bytes": 0.01})]
    )
    def test_nothing_ends_where_the_last_step_is_held_or_no_speed_is(self, policy: Policy) -> None:
        assert passing_ranges(self.BASELINE, policy, "2026-01-09") is None

    def test_what_launches_told_of_each_step_is_no_hindrance(self) -> None:
        def told(one: Launch) -> Launch:
            steps = len(one.step_seconds)
            of_steps: dict[str, Any] = {"step_tokens": (64,) * steps, "allocated_bytes": (1,) * steps}
            return replace(one, ranks=tuple(replace(rank, **of_steps) for rank in one.ranks))

        unequal = of([told(launch(0.2, "a", day)) for day in (1, 1, 2)] + [launch(0.203, "b", 3)])
        assert ranges(unequal) == ranges(self.BASELINE)

    def test_of_several_speeds_the_strictest_counts(self) -> None:
        strict = ranges(self.BASELINE, GPU.merged({"step_seconds": 0.01}))
        assert strict.elsewhere.high < ranges(self.BASELINE).elsewhere.high

    def test_every_metric_is_either_settled_early_or_looked_at(self) -> None:
        # A new one has to be thought about: can steps that are not run change it?
        settled = {"first_step_seconds", "peak_reserved_bytes", "peak_allocated_bytes"}
        speeds = {name for name, metric in measured().items() if metric.rule == "speed"}
        assert set(measured()) == settled | speeds | {"stall_share", "final_loss"}


@pytest.mark.slow
class TestMeasured:
    """Launches of H200s, cut where they would have ended."""

    @pytest.mark.wide
    def test_of_all_that_are_stored_the_verdict_is_the_same_and_steps_are_fewer(self) -> None:
        rows = list(stored(BASELINES, (0.0, 0.03)))
        header, cells = rows[0], [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
        assert header[2] == "ends once"
        for known, decided in zip(cells[::2], cells[1::2], strict=True):
            assert (known["ends once"], decided["ends once"]) == RULES
            assert decided["differ"] == "0", decided
            assert int(decided["set aside"]) <= int(known["set aside"])
            assert int(decided["steps"]) <= int(known["steps"])
        # On other hosts, where nothing changed (docs/explanation/noise.md): a fifth, and of rung 15.8 more. Its newest
        # launches settled later than the first ones.
        assert int(cells[1]["steps"]) < 0.82 * int(cells[0]["steps"])
        assert int(cells[1]["of rung 15.8"]) < 0.72 * int(cells[0]["of rung 15.8"])

    # The one that takes five seconds is replayed with each rule in make test-wide.
    @pytest.mark.parametrize("name", [pytest.param("h200-waits.jsonl", marks=pytest.mark.wide), "h200-products.jsonl"])
    def test_of_injected_slowdowns_the_same_are_found(self, name: str) -> None:
        measured = read([DATA / name])
        before, after = (replay(measured, Ending(rule)) for rule in RULES)
        for was, now in ((before.same_site, after.same_site), (before.elsewhere, after.elsewhere)):
            assert {share: tally.verdicts for share, tally in was.items()} == {
                share: tally.verdicts for share, tally in now.items()
            }
            assert sum(t.steps for t in now.values()) <= sum(t.steps for t in was.values())
        assert after.elsewhere[0.0].steps < before.elsewhere[0.0].steps
