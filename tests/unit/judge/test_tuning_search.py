"""The search itself: what it tries next, what it believes, and how it ends. Nothing is launched."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.tuning_objective import OBJECTIVES, front
from pytest_llmperf.judge.tuning_search import AUTOTUNED, COMPILED, PLAIN, Failures, Field, Outcome, Search, TrialCosts
from pytest_llmperf.judge.tuning_surrogate import Surrogate
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.support import codec
from tools.tuning_world import FIELD, TRAITS, world


def _searched(
    logs: list[float], seed: int, seconds: float = 300.0, fails: Callable[[int], bool] = lambda _: False
) -> tuple[Search, float]:
    """A search, and what its trials took."""
    search, chance, spent = Search(FIELD, steps=9, seed=seed), random.Random(seed), 0.0
    while (number := next(search.promising(seconds - spent), None)) is not None:
        outside = 15.0 if FIELD.compiles[number] else 3.0
        spent += outside + 9 * math.exp(logs[number]) * FIELD.tokens[number]
        search.costs.learn(compiles=FIELD.compiles[number], outside_seconds=outside)
        failed = fails(number)
        search.tell(number, Outcome(None if failed else logs[number] + chance.gauss(0, 0.003), 0.002))
    return search, spent


@pytest.mark.simulated
def test_it_ends_within_one_per_cent_of_the_best_of_504_by_few_trials() -> None:
    gaps = []
    for seed in range(16):
        logs = world(seed)
        search, spent = _searched(logs, seed)
        gaps.append(min(logs[number] for number in search.close_to_best()[:3]) - min(logs))
        assert spent <= 300
        assert len(search.outcomes) < 40
    assert sum(gap < 0.01 for gap in gaps) >= 14
    assert max(gaps) < 0.08


def test_what_never_trains_is_not_tried_again_and_again() -> None:
    logs = world(1)
    broken = {number for number, traits in enumerate(TRAITS) if traits["compile"] == "model" and traits["norm"]}
    search, _ = _searched(logs, 1, fails=broken.__contains__)
    assert len([number for number in search.outcomes if number in broken]) <= 6
    best = min(log for number, log in enumerate(logs) if number not in broken)
    assert logs[search.in_order()[0]] - best < 0.015


def test_excluded_ones_are_never_wanted_and_where_nothing_is_left_nothing_is() -> None:
    search = Search(FIELD, steps=9)
    search.excluded |= {number for number in range(len(TRAITS)) if number not in (5, 7)}
    assert sorted(search.promising(100.0)) == [5, 7]
    search.tell(5, Outcome(0.0))
    search.tell(7, Outcome(0.1))
    assert not list(search.promising(100.0))
    assert search.chance_of_better(0.01) == 0.0
    assert search.in_order() == [5, 7]
    assert search.close_to_best() == [5]


def test_a_space_of_one_is_tried_once() -> None:
    search = Search(Field(traits=[{}], size="size", tokens=[8], compiles=[0]), steps=9)
    assert list(search.promising(1.0)) == [0]
    search.tell(0, Outcome(-9.0, 0.001))
    assert not list(search.promising(1.0))
    assert search.chance_of_better(0.01) == 0.0


def test_it_begins_with_the_first_and_with_a_prior_goes_on_with_the_most_promising() -> None:
    prior = [float(number) for number in range(len(TRAITS))]
    search = Search(Field(TRAITS, "size", FIELD.tokens, FIELD.compiles, prior), steps=9)
    first, second, third, *_ = search.promising(100.0)
    assert first == 0
    assert second < third


def test_the_surrogate_passes_through_what_was_measured_and_is_unsure_elsewhere() -> None:
    surrogate, logs = Surrogate(TRAITS, "size"), world(3)
    seen = list(range(0, len(TRAITS), 23))
    told = surrogate.predict(seen, [logs[n] for n in seen], [0.0] * len(seen))
    for number in seen:
        assert abs(told.mean[number] - logs[number]) < 0.02
    assert max(told.sd[n] for n in seen) < 0.006
    others = [n for n in range(len(TRAITS)) if n not in seen]
    within = sum(abs(told.mean[n] - logs[n]) < 2 * told.sd[n] for n in others) / len(others)
    assert within > 0.85


@given(st.floats(-20, 20))
def test_the_surrogate_knows_no_unit(shift: float) -> None:
    surrogate, logs = Surrogate(TRAITS, "size"), world(4)
    seen = list(range(0, len(TRAITS), 61))
    one = surrogate.predict(seen, [logs[n] for n in seen], [0.0] * len(seen))
    other = surrogate.predict(seen, [logs[n] + shift for n in seen], [0.0] * len(seen))
    assert max(abs(other.mean - one.mean - shift)) < 1e-6
    assert max(abs(other.sd - one.sd)) < 1e-6


def test_failures_blame_what_never_trained() -> None:
    failures = Failures()
    assert failures.chance({"a": 1, "b": 1}) == 1.0
    failures.note({"a": 1, "b": 1}, trained=True)
    failures.note({"a": 2, "b": 2}, trained=True)
    failures.note({"a": 1, "b": 2}, trained=False)  # each trains, the two together do not
    assert failures.chance({"a": 1, "b": 1}) == failures.chance({"a": 2, "b": 2}) == 1.0
    assert failures.chance({"a": 1, "b": 2}) == pytest.approx(1 / 3)
    failures.note({"a": 3, "b": 1}, trained=False)
    failures.note({"a": 3, "b": 2}, trained=False)
    assert failures.chance({"a": 3, "b": 9}) == pytest.approx(1 / 5)


def test_costs_of_trials_are_learnt() -> None:
    costs = TrialCosts()
    assert costs.outside(compiles=COMPILED) > costs.outside(compiles=PLAIN) > 1.0
    for seconds in (2.0, 2.2, 9.0):
        costs.learn(compiles=PLAIN, outside_seconds=seconds)
    assert costs.outside(compiles=PLAIN) == pytest.approx(2.2)
    assert costs.outside(compiles=COMPILED) > 2.2
    costs.learn(compiles=COMPILED, outside_seconds=6.0)
    assert costs.outside(compiles=COMPILED) == 6.0
    assert costs.outside(compiles=AUTOTUNED) > 30.0  # nobody has seen one, and it must not take a short search's time


def _trial(**values: Any) -> Trial:
    figures = {"step_seconds": 0.5, "tokens_per_step": 1000, "peak_reserved_bytes": 2**30, "gpus": 2, "steps": 9}
    return Trial(**{"digest": "d", "id": "i", "wall_seconds": 5.0, **figures, **values})


def test_objectives() -> None:
    trial = _trial(power_watts=600.0)
    costs = {name: math.exp(one.log_of(trial) or 0.0) for name, one in OBJECTIVES.items()}
    assert costs == pytest.approx({"throughput": 1 / 2000, "cost": 1 / 1000, "energy": 0.3, "memory": 2**30})
    assert OBJECTIVES["energy"].log_of(_trial()) is None
    assert all(
        one.log_of(_trial(failure="it broke", kind="error", power_watts=1.0)) is None for one in OBJECTIVES.values()
    )


def test_the_front_is_what_no_other_beats_in_speed_and_memory() -> None:
    trials = {
        "fast": _trial(step_seconds=0.4, peak_reserved_bytes=9),
        "worse": _trial(step_seconds=0.45, peak_reserved_bytes=9),
        "small": _trial(step_seconds=0.6, peak_reserved_bytes=3),
        "slow": _trial(step_seconds=0.7, peak_reserved_bytes=4),
        "failed": _trial(step_seconds=0.1, peak_reserved_bytes=1, failure="no"),
    }
    assert front(trials) == ["fast", "small"]


class TestTrial:
    def test_it_comes_back_as_it_was_written(self) -> None:
        trial = _trial(disturbances=("python 7",), failure="it broke", kind="oom")
        assert codec.read(Trial, codec.plain(trial)) == trial

    @pytest.mark.parametrize(
        "values",
        [
            {},
            {"digest": "d"},
            {"step_seconds": -1.0},
            {"step_seconds": "1"},
            {"steps": True},
            {"other": 1},
            {"id": 3},
            {"wall_seconds": math.nan},
        ],
    )
    def test_what_is_none_is_refused(self, values: dict[str, Any]) -> None:
        document = {**codec.plain(_trial()), **values} if values and values != {"digest": "d"} else values
        with pytest.raises(ValueError, match=r"expected|has no|unknown"):
            codec.read(Trial, document)


def test_what_was_spoilt_steers_nothing_and_is_tried_once_more() -> None:
    search, logs = Search(FIELD, steps=9), world(6)
    for _ in range(6):
        number = next(search.promising(600.0))
        search.tell(number, Outcome(logs[number], 0.002))
    best, before = search.in_order()[0], search.prediction()
    wanted = next(search.promising(600.0))
    search.tell(wanted, Outcome(logs[wanted] + 0.7, 0.002, is_spoilt=True))
    after = search.prediction()
    assert abs(after.mean[wanted] - before.mean[wanted]) < 0.1  # of the 0.7 that a neighbour took
    assert wanted in search.left
    assert wanted in list(search.promising(600.0))
    search.tell(wanted, Outcome(logs[best] - 1.0, 0.002, is_spoilt=True))
    assert wanted not in search.left
    assert search.in_order()[0] == search.close_to_best()[0] == best
    search.tell(wanted, Outcome(logs[best] - 1.0, 0.002))
    assert search.in_order()[0] == wanted


def test_a_failure_that_is_others_says_nothing_of_what_is_alike() -> None:
    search = Search(FIELD, steps=9)
    search.tell(0, Outcome(0.0))
    search.tell(9, Outcome(None, ran_out_seconds=60.0, is_spoilt=True))
    assert search.timeouts.blamed == {}
    assert search.left == [n for n in range(len(TRAITS)) if n]


@pytest.mark.simulated
def test_the_chance_that_something_better_is_left_is_what_it_says() -> None:
    """Over worlds and moments of a search: of chances around one half about half come true."""
    told, true = [], []
    for seed in range(24):
        logs = world(seed)
        search, _ = _searched(logs, seed, seconds=30.0 + 15 * (seed % 8))
        best = min(logs[number] for number in search.outcomes)
        told.append(search.chance_of_better(0.01))
        true.append(min(logs[number] for number in search.left) < best + math.log1p(-0.01))
    assert abs(sum(told) - sum(true)) < 6
    sure = [came for chance, came in zip(told, true, strict=True) if chance < 0.2]
    assert sum(sure) <= max(1, len(sure) // 3)
    assert min(told) < 0.5 < max(told)


def test_what_it_is_told_to_begin_with_comes_after_the_first_of_all() -> None:
    """Of each beginning the first that was not excluded; one that would take too much of the time is left to later."""
    plain, compiled = ([n for n in range(len(TRAITS)) if FIELD.compiles[n] == kind] for kind in (PLAIN, COMPILED))
    field = replace(FIELD, beginnings=[plain[5:8], compiled[5:8]])

    def order(seconds: float) -> list[int]:
        search, found = Search(field, steps=9), list[int]()
        search.excluded.add(plain[5])
        while len(found) < 3:
            found.append(next(search.promising(seconds)))
            search.tell(found[-1], Outcome(0.0))
        return found

    assert order(600.0) == [0, plain[6], compiled[5]]
    assert order(60.0)[:2] == [0, plain[6]]
    assert FIELD.compiles[order(60.0)[2]] == PLAIN


def test_a_beginning_that_failed_is_not_begun_with_again() -> None:
    search = Search(replace(FIELD, beginnings=[[40, 41]]), steps=9)
    search.tell(0, Outcome(0.0))
    search.tell(40, Outcome(None))
    assert next(search.promising(600.0)) not in {40, 41}
