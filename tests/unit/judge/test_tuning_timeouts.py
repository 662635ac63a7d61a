"""What a search makes of a trial that ran out of its time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.tuning_search import Field, Outcome, Search, Timeouts
from tests.examples import examples
from tools.tuning_timeouts import has, searched
from tools.tuning_world import FIELD, TRAITS, world

_LATE = Outcome(None, ran_out_seconds=60.0)

_TRAIT_SETS = st.fixed_dictionaries({name: st.integers(0, 2) for name in "abc"} | {"size": st.sampled_from([1, 2, 4])})


def test_to_blame_is_what_nothing_had_that_came_to_its_end() -> None:
    timeouts = Timeouts("size")
    timeouts.ran_out(0, {"a": 1, "b": 1, "size": 8}, 90.0)  # before anything trained: the host may be to blame
    assert (timeouts.blamed, timeouts.seconds) == ({}, 0.0)
    timeouts.in_time({"a": 1, "b": 1, "size": 8})
    timeouts.ran_out(4, {"a": 2, "b": 2, "size": 16}, 60.0)
    assert timeouts.blamed == {4: {"a": 2, "b": 2}}
    assert [timeouts.risk({"a": a, "b": b, "size": 64}) for a, b in ((1, 1), (1, 2), (2, 2))] == [0.0, 0.5, 1.0]
    assert timeouts.like({"a": 2, "b": 2, "size": 1}) == [4]
    timeouts.in_time({"a": 2, "b": 1, "size": 8})
    assert timeouts.blamed == {4: {"b": 2}}
    assert timeouts.seconds == 60.0
    timeouts.in_time({"a": 2, "b": 2, "size": 8})
    assert (timeouts.blamed, timeouts.risk({"a": 2, "b": 2, "size": 16})) == ({}, 0.0)


@given(st.lists(_TRAIT_SETS, min_size=1), st.lists(_TRAIT_SETS, min_size=1), _TRAIT_SETS)
def test_what_shares_no_choice_is_no_risk_and_what_trained_clears_its_own(
    trained: list[dict[str, int]], late: list[dict[str, int]], one: dict[str, int]
) -> None:
    timeouts = Timeouts("size")
    for traits in trained:
        timeouts.in_time(traits)
    for number, traits in enumerate(late):
        timeouts.ran_out(number, traits, 60.0)
    risk = timeouts.risk(one)
    assert 0.0 <= risk <= 1.0
    assert (risk == 1.0) == bool(timeouts.like(one))
    new = {name for name in "abc" if one[name] not in {traits[name] for traits in trained}}
    assert bool(risk) == any(one[name] == traits[name] for name in new for traits in late)
    timeouts.in_time(one)
    assert timeouts.risk(one) == 0.0


def _told(late: int, trained: int = 5) -> Search:
    """A search that some were trained of, and one was late."""
    search, logs = Search(FIELD, steps=9), world(5)
    for _ in range(trained):
        number = next(search.promising(600.0))
        search.tell(number, Outcome(logs[number], 0.002))
    search.tell(late, _LATE)
    return search


@examples(15)
@given(st.integers(0, len(TRAITS) - 1), st.integers(1, 8))
def test_what_is_like_one_that_was_late_comes_last_and_after_a_second_not_at_all(late: int, trained: int) -> None:
    search = _told(late, trained)
    order = [bool(search.timeouts.like(TRAITS[number])) for number in search.promising(600.0)]
    assert order == sorted(order)
    if not search.timeouts.blamed:
        return
    again = next((n for n in search.left if late in search.timeouts.like(TRAITS[n])), None)
    if again is not None:
        search.tell(again, _LATE)
        assert not any(len(search.timeouts.like(TRAITS[number])) > 1 for number in search.promising(600.0))


@examples(15)
@given(st.integers(0, 999))
def test_nothing_is_promising_that_would_not_be_over_in_time_if_it_ran_out_of_its_own(seed: int) -> None:
    """60 s are left: what is like the one that took 60 s is not begun."""
    chance = random.Random(seed)
    search = _told(chance.randrange(len(TRAITS)))
    assert not any(search.timeouts.like(TRAITS[number]) for number in search.promising(60.0))


def test_of_what_a_search_is_told_to_begin_with_nothing_comes_that_may_be_late_too() -> None:
    layers = [n for n, traits in enumerate(TRAITS) if traits["compile"] == "layers" and traits["loss"]]
    search = Search(replace(FIELD, beginnings=[layers[:1], layers[5:6]]), steps=9)
    search.tell(0, Outcome(0.0))
    assert next(search.promising(600.0)) == layers[0]
    search.tell(layers[0], _LATE)
    following = TRAITS[next(search.promising(600.0))]
    assert (following["compile"], following["loss"]) == ("no", False)


def test_how_many_are_put_off_is_told_by_the_one_they_are_like() -> None:
    field = Field(traits=[{"a": a} for a in (1, 2, 2, 2)], size="size", tokens=[8] * 4, compiles=[0] * 4)
    search = Search(field, steps=9)
    search.tell(0, Outcome(0.0))
    search.tell(2, _LATE)
    assert search.put_off() == {2: 2}
    search.tell(3, Outcome(0.1))  # it was not to blame
    assert search.put_off() == {}


@pytest.mark.parametrize("choice", [{"compile": "model"}, {"attention": "flash"}], ids=str)
def test_one_choice_that_hangs_takes_the_time_of_one_trial(choice: dict[str, str]) -> None:
    """The table of docs/explanation/tuning.md has more worlds."""
    found = [searched(seed, has(**choice), 300.0, tells=True) for seed in range(8)]
    assert sum(late for _, late in found) <= 10
    assert sum(gap < 0.01 for gap, _ in found) >= 6
    untold = [searched(seed, has(**choice), 300.0, tells=False) for seed in range(8)]
    assert sum(late for _, late in untold) >= 2 * sum(late for _, late in found)
