"""Which steps of a launch count."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from statistics import fmean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.steady_state import Steady, find_steady
from tests.golden import Golden


def noisy(number: int, level: float = 0.2, spread: float = 0.003, seed: int = 1) -> list[float]:
    source = random.Random(seed)
    return [level * math.exp(source.gauss(0, spread)) for _ in range(number)]


def slowed(times: list[float], which: Iterable[int], factor: float) -> list[float]:
    return [second * (factor if index in set(which) else 1) for index, second in enumerate(times)]


def test_a_steady_launch_counts_from_its_warm_up_on() -> None:
    steady = find_steady([2.0, *noisy(39)], 4)
    assert 4 <= steady.start <= 20
    assert steady.error < 0.002
    assert abs(steady.drift) < 0.005
    assert (steady.stalls, steady.bimodal) == (0.0, False)


def test_a_slow_beginning_is_cut_however_long() -> None:
    for slow in (6, 10, 14):
        times = [*noisy(slow, 0.25), *noisy(40 - slow)]
        assert find_steady(times, 2).start in range(slow, slow + 8)


def test_a_fast_beginning_is_cut_too() -> None:
    # A chip that was cool: its first steps are three per cent faster.
    assert find_steady([*noisy(8, 0.194), *noisy(32)], 2).start >= 8


def test_at_most_half_is_cut() -> None:
    assert find_steady([*noisy(30, 0.3), *noisy(10)], 2).start <= 20


def test_one_stall_moves_neither_the_cut_nor_the_error_and_is_told() -> None:
    times = noisy(40)
    stalled = [*times[:25], 1.2, *times[26:]]
    clean, hit = find_steady(times, 4), find_steady(stalled, 4)
    assert (hit.start, clean.start) == (hit.start, hit.start)
    assert hit.error < 2 * clean.error
    assert hit.stalls == pytest.approx(1.0 / sum(stalled[hit.start :]), rel=0.05)


@pytest.mark.parametrize("steps", [24, 40, 60])
@pytest.mark.parametrize("at", [5, 8, 11, 20])
@pytest.mark.parametrize("number", [2, 3])
def test_a_stall_of_several_steps_moves_no_cut_wherever_it_is(steps: int, at: int, number: int) -> None:
    times = [2.0, *noisy(steps - 1)]
    stalled = slowed(times, range(at, at + number), 1.5)
    clean, hit = find_steady(times, 4), find_steady(stalled, 4)
    assert hit.start == clean.start
    assert hit.stalls == pytest.approx(number * 0.1 / sum(stalled[4:]), rel=0.15)
    assert abs(hit.drift) < 0.02


def test_a_stall_that_was_cut_away_is_told_all_the_same() -> None:
    # Longer than what passes for a stall: the steady state begins after it, the time it took is lost.
    times = slowed([2.0, *noisy(39)], range(8, 16), 1.5)
    assert find_steady(times, 4).start >= 16
    assert find_steady(times, 4).stalls == pytest.approx(8 * 0.1 / sum(times[4:]), rel=0.05)


@pytest.mark.parametrize("slow", [5, 8, 14])
def test_a_slow_beginning_is_no_stall_and_hides_none(slow: int) -> None:
    begun = slowed([2.0, *noisy(39)], range(1, slow), 1.3)
    assert find_steady(begun, 4).start in range(slow, slow + 8)
    assert find_steady(begun, 4).stalls < 0.002
    stalled = slowed(begun, range(20, 23), 1.5)
    assert find_steady(stalled, 4).start in range(slow, slow + 8)
    assert find_steady(stalled, 4).stalls == pytest.approx(0.3 / sum(stalled[slow:]), rel=0.05)


def test_a_beginning_that_settles_step_by_step_is_no_stall() -> None:
    times = [second * (1 + 0.3 * max(0.0, 1 - index / 10)) for index, second in enumerate(noisy(40))]
    assert find_steady(times, 1).start in range(8, 20)
    assert find_steady(times, 1).stalls < 0.003


@pytest.mark.parametrize("spread", [0.0005, 0.003, 0.01])
def test_a_slowdown_of_some_of_the_steps_is_told(spread: float) -> None:
    times = [2.0, *noisy(47, spread=spread)]
    every_fourth = find_steady(slowed(times, range(0, 48, 4), 1.3), 4)
    assert every_fourth.stalls == pytest.approx(0.07, abs=0.008)
    some = find_steady(slowed(times, random.Random(3).sample(range(48), 14), 1.1), 4)
    assert some.stalls > 0.015


def test_noise_is_no_slowdown() -> None:
    assert max(find_steady(noisy(16, spread=0.01, seed=seed), 4).stalls for seed in range(200)) < 0.01


def test_drift_is_told_and_is_not_noise() -> None:
    times = [second * (1 + 0.001 * index) for index, second in enumerate(noisy(40, spread=0.001))]
    steady = find_steady(times, 4)
    assert steady.drift > 0.01
    assert steady.error < 0.001


def test_two_speeds_are_told() -> None:
    times = [0.2 if index % 3 else 0.21 for index in range(60)]
    jittered = [a * b / 0.2 for a, b in zip(times, noisy(60, spread=0.0005), strict=True)]
    assert find_steady(jittered, 4).bimodal
    assert not find_steady(noisy(60), 4).bimodal


def following(number: int, rho: float, seed: int = 3, spread: float = 0.005) -> list[float]:
    source = random.Random(seed)
    value, times = source.gauss(0, spread), []
    for _ in range(number):
        times.append(0.2 * math.exp(value))
        value = rho * value + source.gauss(0, spread * math.sqrt(1 - rho * rho))
    return times


def test_autocorrelated_steps_say_less() -> None:
    assert find_steady(following(200, 0.8), 4).error > 1.5 * find_steady(noisy(200, spread=0.005), 4).error


def test_a_clock_that_never_varies_has_no_error() -> None:
    assert find_steady([0.5, *[0.1] * 20], 1) == Steady(1, 0.0, 0.0, 0.0, bimodal=False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0, 1e-320, 1e308])
def test_a_time_that_is_none_raises_nothing_and_is_no_steady_state(bad: float) -> None:
    assert find_steady([0.1] * 10 + [bad], 2).error == math.inf


def test_no_step_left(golden: Golden) -> None:
    with pytest.raises(ValueError, match="warm-up") as raised:
        find_steady([0.1] * 3, 3)
    golden(raised)


def test_too_few_steps_are_never_known() -> None:
    assert find_steady([0.1] * 6, 4).error == math.inf


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.7])
@pytest.mark.parametrize("number", [16, 24, 40, 60])
def test_the_error_is_what_medians_scatter_by(rho: float, number: int) -> None:
    launches = [following(number, rho, seed) for seed in range(300)]
    found = [find_steady(times, 4) for times in launches]
    scatter = stdev(math.log(median(times[steady.start :])) for times, steady in zip(launches, found, strict=True))
    said = math.sqrt(fmean(steady.error**2 for steady in found))
    assert 0.8 < said / scatter < 1.6


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=80), st.integers(1, 5))
def test_it_always_answers(times: list[float], warmup: int) -> None:
    warmup = min(warmup, len(times) - 1)
    steady = find_steady(times, warmup)
    assert warmup <= steady.start < len(times)
    assert steady.error >= 0
    assert 0 <= steady.stalls < 1


def test_ten_thousand_steps_are_quick() -> None:
    assert find_steady(noisy(10_000), 4).error < 1e-4


@pytest.mark.parametrize(("slow", "are_two"), [({10, 13}, False), ({10, 13, 16}, True)])
def test_the_rarer_of_two_speeds_has_a_seventh_of_the_steps_at_least(slow: set[int], are_two: bool) -> None:
    times = [each * (1.05 if index in slow else 1.0) for index, each in enumerate(noisy(20, spread=0.0002))]
    assert find_steady(times, 0).bimodal == are_two
