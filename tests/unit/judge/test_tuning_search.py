"""The search itself: what it tries next, what it believes, and how it ends. Nothing is launched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pytest_llmperf.judge.objective import OBJECTIVES, Trial
from pytest_llmperf.judge.tuning import AUTOTUNED, COMPILED, PLAIN, WHOLE, Beliefs, Choices, Field, Outcome, Search
from pytest_llmperf.support import codec

_AXES: Mapping[str, tuple[str, ...]] = {
    "size": ("8", "1", "2", "4", "16", "32", "64"),
    "attention": ("sdpa", "flash", "eager"),
    "norm": ("off", "on"),
    "compile": ("no", "layers"),
    "kept": ("all", "few"),
}
CHOICES = [dict(zip(_AXES, values, strict=True)) for values in itertools.product(*_AXES.values())]
FIELD = Field(
    choices=CHOICES,
    size_axis="size",
    sizes=[int(one["size"]) for one in CHOICES],
    tokens=[1024 * int(one["size"]) for one in CHOICES],
    compiles=[COMPILED if one["compile"] == "layers" else PLAIN for one in CHOICES],
    wastes=[0.25 * (one["kept"] == "few") + 0.3 * (one["attention"] == "eager") for one in CHOICES],
)
_PLAIN = ("all", "sdpa", "off")
_EFFECTS = {"flash": -0.05, "on": -0.1, "layers": -0.06, "few": 0.3, "eager": 0.4}


def _number(**choices: str) -> int:
    return CHOICES.index({**CHOICES[0], **choices})


def _log(choices: Choices) -> float:
    return math.log(1 + 3 / int(choices["size"])) + sum(_EFFECTS.get(one, 0.0) for one in choices.values())


def _tell(search: Search, number: int, **values: Any) -> None:
    log = _log(CHOICES[number])
    search.tell(number, Outcome(**{"log": log, "step_seconds": math.exp(log) * FIELD.sizes[number] / 600, **values}))


def _searched(fails: Callable[[Choices], bool] = lambda _: False, largest: int = 64) -> tuple[Search, list[int]]:
    """A search of all but what arithmetic condemns, on a card that holds so many sequences."""
    search, order = Search(FIELD, steps=7), list[int]()
    while (number := next(search.promising(lambda _: 600.0), None)) is not None:
        if FIELD.sizes[number] * (0.5 if CHOICES[number]["kept"] == "few" else 1) > largest:
            search.excluded.add(number)
            continue
        order.append(number)
        failed = fails(CHOICES[number])
        _tell(search, number, **({"log": None} if failed else {}))
    return search, order


def test_it_begins_with_the_first_and_finds_the_best_of_168_by_few_trials() -> None:
    search, order = _searched()
    assert order[0] == 0
    assert search.in_order()[0] == _number(size="64", attention="flash", norm="on", compile="layers")
    assert order.index(search.in_order()[0]) < 20


def test_what_arithmetic_condemns_is_not_tried() -> None:
    _, order = _searched()
    assert {(CHOICES[number]["kept"], CHOICES[number]["attention"] == "eager") for number in order} == {("all", False)}
    assert "1" not in {CHOICES[number]["size"] for number in order}


def test_where_memory_is_short_a_larger_micro_batch_is_tried_with_what_spares_it() -> None:
    _, order = _searched(largest=1)
    assert _number(size="2", kept="few") in order
    assert _number(size="1", kept="few") not in order  # of which nothing is short


def test_the_larger_micro_batch_of_what_is_good_comes_before_all_that_brings_less() -> None:
    search = Search(FIELD, steps=7)
    for size in ("1", "2"):
        search.excluded |= {n for n, one in enumerate(CHOICES) if one["size"] == size}
    _tell(search, 0)
    _tell(search, _number(size="4"))
    assert next(search.promising(lambda _: 600.0)) == _number(size="32")
    search.excluded |= {n for n, one in enumerate(CHOICES) if one["size"] == "32"}
    assert next(search.promising(lambda _: 600.0)) == _number(size="16")


def test_what_spares_no_memory_may_be_worth_fewer_sequences() -> None:
    """Here as many sequences do not fit without recomputation."""
    search, spared = Search(FIELD, steps=7), _number(size="32", kept="few")
    search.excluded |= {*range(len(CHOICES))} - {0, spared, _number(size="16"), _number(size="16", kept="few")}
    search.tell(0, Outcome(0.5, 0.1))
    search.tell(spared, Outcome(0.0, 0.1))
    assert next(search.promising(lambda _: 600.0)) == _number(size="16")


def test_in_a_part_of_a_space_the_best_is_found_where_no_single_step_leads_to_it() -> None:
    search, best = Search(FIELD, steps=7), _number(size="32", attention="flash", norm="on", compile="layers")
    search.excluded |= {*range(len(CHOICES))} - {0, best, _number(size="1", kept="few")}
    _tell(search, 0)
    assert next(search.promising(lambda _: 600.0)) == best


def test_where_larger_micro_batches_are_slower_all_that_are_left_are_weighed() -> None:
    search = Search(FIELD, steps=7)
    for size, norm, log in [("4", "on", 0.0), ("8", "on", 0.4), ("8", "off", -0.5)]:
        _tell(search, _number(size=size, norm=norm), log=log)
    assert _number(size="1", norm="on") in search.promising(lambda _: math.inf)


def test_what_a_choice_did_at_a_far_smaller_micro_batch_is_tried_again() -> None:
    """Compiled, a few sequences wait for the host; many do not."""
    search = Search(FIELD, steps=7)
    search.excluded |= {n for n, one in enumerate(CHOICES) if (one["kept"], one["attention"], one["norm"]) != _PLAIN}
    for size in ("1", "2", "4", "8", "16", "32", "64"):
        _tell(search, _number(size=size))
    small = _number(size="1", compile="layers")
    _tell(search, small, log=_log(CHOICES[_number(size="1")]) + 0.05)
    assert next(search.promising(lambda _: 600.0)) == _number(size="64", compile="layers")


def test_what_never_trains_is_not_tried_again_and_again() -> None:
    search, order = _searched(lambda one: one["norm"] == "on")
    assert sum(CHOICES[number]["norm"] == "on" for number in order) <= 2
    assert search.in_order()[0] == _number(size="64", attention="flash", compile="layers")


def test_what_one_choice_brings_is_not_hoped_of_another_of_its_axis() -> None:
    """Flash is the best beside the one norm and cannot be had beside the other; eager is the worst, and comes last."""
    choices = [{"attention": one, "norm": norm} for norm in "xyz" for one in ("sdpa", "flash", "eager")]
    del choices[7:], choices[4]
    ones = [1] * len(choices)
    search = Search(Field(choices, "", ones, ones, ones, [0.0] * len(choices)), steps=7)
    for number, log in enumerate((0.0, -0.2, 0.1, -0.5)):
        search.tell(number, Outcome(log, step_seconds=0.1))
    assert search.left == [4, 5]
    assert [*dict.fromkeys(search.promising(lambda _: 600.0))] == [5, 4]


def test_two_choices_that_fail_together_keep_neither_from_the_best() -> None:
    search, order = _searched(lambda one: (one["norm"], one["compile"]) == ("on", "layers"))
    assert search.in_order()[0] == _number(size="64", attention="flash", norm="on")
    assert sum((CHOICES[n]["norm"], CHOICES[n]["compile"]) == ("on", "layers") for n in order) <= 4


def test_before_anything_trained_no_choice_is_to_blame() -> None:
    begins = _number(size="4", norm="on")
    search = Search(Field(**{**vars(FIELD), "beginnings": [[begins]]}), steps=7)
    _tell(search, 0, log=None)
    assert next(search.promising(lambda _: 600.0)) == begins


def test_what_failed_is_tried_with_another_micro_batch_after_all_else() -> None:
    search = Search(FIELD, steps=7)
    _tell(search, 0, log=None)
    order = [CHOICES[number] for number in search.promising(lambda _: 600.0)]
    sizes = len({*FIELD.sizes})
    assert {**order[0], "size": ""} != {**CHOICES[0], "size": ""}
    assert [{**one, "size": ""} for one in order[1 - sizes :]] == [{**CHOICES[0], "size": ""}] * (sizes - 1)


def test_excluded_ones_are_never_wanted_and_where_nothing_is_left_nothing_is() -> None:
    search = Search(FIELD, steps=7)
    search.excluded |= {number for number in range(len(CHOICES)) if number not in (5, 7)}
    assert sorted(search.promising(lambda _: 100.0)) == [5, 7]
    search.tell(5, Outcome(0.0))
    search.tell(7, Outcome(0.1))
    assert not list(search.promising(lambda _: 100.0))
    assert search.in_order() == [5, 7]
    assert search.close_to_best() == [5]


def test_close_is_what_trials_leave_open() -> None:
    search = Search(FIELD, steps=7)
    for number, (log, error) in enumerate([(0.0, 0.05), (0.014, 0.0), (0.1, 0.05), (0.2, 0.05), (0.3, 0.2)]):
        search.tell(number, Outcome(log, error=error))
    assert search.close_to_best() == [0, 1, 2, 4]


def test_a_space_of_one_is_tried_once() -> None:
    search = Search(Field(choices=[{}], size_axis="", sizes=[1], tokens=[8], compiles=[0], wastes=[0.0]), steps=7)
    assert list(search.promising(lambda _: 1.0)) == [0]
    search.tell(0, Outcome(-9.0, 0.001))
    assert not list(search.promising(lambda _: 1.0))


def test_costs_of_trials_are_learnt() -> None:
    search = Search(FIELD, steps=7)
    assert search.outside(COMPILED) > search.outside(PLAIN) > 1.0
    for seconds, number in ((2.0, 0), (2.2, _number(size="4")), (9.0, _number(size="2"))):
        _tell(search, number, outside_seconds=seconds)
    assert search.outside(COMPILED) > 2.2
    for seconds, size in (
        (6.0, "8"),
        (30.0, "4"),
    ):  # of one alone, which may have been the host's first, half is believed
        _tell(search, _number(compile="layers", size=size), outside_seconds=seconds)
        assert search.outside(COMPILED) == pytest.approx(10.5 if size == "8" else 15.0)
    assert search.outside(WHOLE) > 40.0
    assert search.outside(AUTOTUNED) > 30.0  # nobody has seen one, and it must not take a short search's time


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
    search, number = Search(FIELD, steps=7), _number(norm="on")
    _tell(search, 0)
    _tell(search, number, log=-5.0, is_spoilt=True)
    assert search.in_order() == search.close_to_best() == [0]
    assert number in search.left
    assert number in list(search.promising(lambda _: 600.0))
    _tell(search, number, log=-5.0, is_spoilt=True)
    assert number not in search.left
    assert search.in_order() == [0]
    _tell(search, number)
    assert search.in_order()[0] == number


def test_a_failure_that_is_others_says_nothing_of_what_is_alike() -> None:
    search = Search(FIELD, steps=7)
    _tell(search, 0)
    _tell(search, 9, log=None, is_spoilt=True)
    assert search.left == [number for number in range(len(CHOICES)) if number]


def test_what_it_is_told_to_begin_with_comes_after_the_first_of_all() -> None:
    """Of each beginning the first that was not excluded; one that takes much of the time left is weighed by its seconds
    as single steps are, and is not begun where they are too few."""
    plain = [_number(size="32", norm="on"), _number(size="16", norm="on")]
    compiled = [_number(compile="layers", size="16")]
    field = Field(**{**vars(FIELD), "beginnings": [plain, compiled]})

    def order(seconds: float, most: int = 3) -> list[int]:
        search, found = Search(field, steps=7), list[int]()
        search.excluded.add(plain[0])
        while len(found) < most:
            found.append(next(search.promising(lambda _: seconds)))
            search.tell(found[-1], Outcome(0.0, 0.1))
        return found

    assert order(600.0) == [0, plain[1], compiled[0]]
    assert order(60.0)[:2] == [0, plain[1]]
    assert compiled[0] in order(60.0, 10)
    assert order(10.0)[:2] == [0, plain[1]]
    assert compiled[0] not in order(10.0, 10)


def test_a_recipe_of_a_minute_comes_after_single_steps_and_not_last() -> None:
    """A whole model compiled may be twice as fast; a sixth of four minutes is less than it takes."""
    whole, compiles = _number(compile="layers", size="64", attention="flash", norm="on"), [*FIELD.compiles]
    compiles[whole] = WHOLE
    search, found = (
        Search(Field(**{**vars(FIELD), "compiles": compiles, "beginnings": [[whole]]}), steps=7),
        list[int](),
    )
    while whole not in found:
        found.append(next(search.promising(lambda _: 150.0)))
        search.tell(found[-1], Outcome(0.0, 0.1, 3.0))
    assert 2 < len(found) < 12


def test_a_recipe_that_would_have_no_time_behind_the_next_step_is_not_put_off() -> None:
    """Many steps promise less, and more for each of their seconds."""
    names, recipe = [f"choice-{number}" for number in range(40)], 39
    choices = [{"attention": "sdpa", "name": name} for name in names]
    ones = [1] * len(names)
    field = Field(choices, "", ones, ones, [PLAIN] * 39 + [WHOLE], [0.0] * len(names), beginnings=[[recipe]])
    search, order, left = Search(field, steps=7, beliefs=Beliefs(untried=0.5)), list[int](), [65.0]
    while recipe not in order and left[-1] > 0.0:
        order.append(next(search.promising(lambda _: left[-1])))
        search.tell(order[-1], Outcome(0.0, 0.1, 3.0))
        left.append(left[-1] - 3.7)
    assert order[0] == 0
    assert order.index(recipe) > 3
    assert 45.7 <= left[order.index(recipe)] < 45.7 + 2 * 3.7


def test_a_recipe_is_begun_once_also_where_the_best_has_changed_since() -> None:
    first, second = _number(compile="layers", size="32"), _number(compile="layers", size="32", norm="on")
    search = Search(Field(**{**vars(FIELD), "beginnings": [[first]]}), steps=7)
    _tell(search, 0)
    assert next(search.promising(lambda _: 600.0)) == first
    _tell(search, first)
    search.over(Field(**{**vars(FIELD), "beginnings": [[second]]}))
    assert search._begun_by(0) is None
    larger = _number(compile="layers", size="64", norm="on")
    search.over(Field(**{**vars(FIELD), "beginnings": [[larger]]}))
    assert search._begun_by(0) is None  # twice as large is one step


def test_a_recipe_is_begun_again_where_the_micro_batch_has_grown_or_needs_no_memory_spared() -> None:
    for first, then in [({"size": "4"}, {"size": "16"}), ({"size": "32", "kept": "few"}, {"size": "32"})]:
        recipe, same = _number(compile="layers", **first), _number(compile="layers", norm="on", **then)
        search = Search(Field(**{**vars(FIELD), "beginnings": [[recipe]]}), steps=7)
        _tell(search, 0)
        _tell(search, recipe)
        search.over(Field(**{**vars(FIELD), "beginnings": [[same]]}))
        assert search._begun_by(0) == same


def test_of_a_recipe_that_is_followed_only_what_is_better_is_begun_and_what_is_not_comes_last() -> None:
    better, own, lesser = (_number(size="32", norm="on", attention=one) for one in ("flash", "sdpa", "eager"))
    field = Field(**{**vars(FIELD), "beginnings": [[better, own, lesser]], "wastes": [0.0] * len(CHOICES)})
    search = Search(field, steps=7)
    _tell(search, 0, log=1.0)
    _tell(search, own)
    assert search._begun_by(0) == better
    _tell(search, better, log=None)
    assert search._begun_by(0) is None
    left = list(search.promising(lambda _: 600.0))
    changed = {CHOICES[number]["attention"] == "eager": place for place, number in reversed([*enumerate(left)])}
    assert changed[False] < 5 < changed[True]
    for size, log in [("16", 0.4), ("16", 0.1)]:  # what was seen is believed
        _tell(search, _number(size=size, norm="on", attention="sdpa" if log > 0.2 else "eager"), log=log)
    assert search._choice_gains(own)["attention", "eager"][0] > 0.3


def test_a_beginning_that_failed_is_not_begun_with_again() -> None:
    beginning = [_number(norm="on", size="32"), _number(norm="on", size="16")]
    search = Search(Field(**{**vars(FIELD), "beginnings": [beginning]}), steps=7)
    _tell(search, 0)
    _tell(search, beginning[0], log=None)
    assert next(search.promising(lambda _: 600.0)) not in beginning


def test_along_a_scale_a_step_goes_to_the_next_number_and_on_from_there() -> None:
    numbers = [str(2**power) for power in range(7)]
    choices = [{"workers": number} for number in numbers]
    ones = [1] * len(numbers)
    field = Field(choices, "", ones, ones, ones, [0.0] * len(numbers), scales={"workers": numbers})
    search, order = Search(field, steps=7), list[int]()
    while (number := next(search.promising(lambda _: 600.0), None)) is not None:
        order.append(number)
        search.tell(number, Outcome(0.1 * abs(number - 3), step_seconds=0.1))
    assert order == [0, 1, 2, 3, 4]
