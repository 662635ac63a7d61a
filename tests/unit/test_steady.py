"""Which steps of a launch count."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.steady import Steady, find_steady


def noisy(number: int, level: float = 0.2, spread: float = 0.003, seed: int = 1) -> list[float]:
    source = random.Random(seed)
    return [level * math.exp(source.gauss(0, spread)) for _ in range(number)]


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


def test_autocorrelated_steps_say_less() -> None:
    source, value, times = random.Random(3), 0.0, []
    for _ in range(200):
        value = 0.8 * value + source.gauss(0, 0.003)
        times.append(0.2 * math.exp(value))
    independent = noisy(200, spread=0.005)
    assert find_steady(times, 4).error > 1.5 * find_steady(independent, 4).error


def test_a_clock_that_never_varies_has_no_error() -> None:
    assert find_steady([0.5, *[0.1] * 20], 1) == Steady(1, 0.0, 0.0, 0.0, bimodal=False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_none_raises_nothing_and_is_no_steady_state(bad: float) -> None:
    assert find_steady([0.1] * 10 + [bad], 2).error == math.inf


def test_no_step_left() -> None:
    with pytest.raises(ValueError, match="3 steps, 3 of them warm-up"):
        find_steady([0.1] * 3, 3)


def test_too_few_steps_are_never_known() -> None:
    assert find_steady([0.1] * 6, 4).error == math.inf


def test_the_error_is_what_medians_scatter_by() -> None:
    launches = [noisy(30, seed=seed) for seed in range(300)]
    medians = [math.log(median(times[find_steady(times, 4).start :])) for times in launches]
    mean = sum(medians) / len(medians)
    scatter = math.sqrt(sum((value - mean) ** 2 for value in medians) / (len(medians) - 1))
    said = median(find_steady(times, 4).error for times in launches)
    assert 0.6 < said / scatter < 1.6


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=80), st.integers(1, 5))
def test_it_always_answers(times: list[float], warmup: int) -> None:
    warmup = min(warmup, len(times) - 1)
    steady = find_steady(times, warmup)
    assert warmup <= steady.start < len(times)
    assert steady.error >= 0
    assert 0 <= steady.stalls < 1


def test_ten_thousand_steps_are_quick() -> None:
    assert find_steady(noisy(10_000), 4).error < 1e-4
