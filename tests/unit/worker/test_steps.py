"""Which calls of optimizers end a step, for the orders in which trainings call them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.worker.script.steps import Steps, StepsError
from tests.golden import Golden

NAMES = {"a": "AdamW", "m": "Muon", "d": "AdamW", "g": "AdamW", "s": "SGD", "o": "Outer", "z": "AdamW"}


def heard(calls: str, step: str | int = "auto") -> tuple[list[int], Steps]:
    """Where in ``calls`` steps ended: letters are optimizers, a dot is a backward pass, | an end as it is meant."""
    steps, passes, places, found = Steps(step), 0, list[int](), list[int]()
    for place, what in enumerate(calls):
        if what == ".":
            passes += 1
        elif what in NAMES:
            places.append(place)
            found += (places[call] for call in steps.call(ord(what), NAMES[what], passes))
    return found, steps


def meant(calls: str) -> list[int]:
    return [place - 1 for place, what in enumerate(calls) if what == "|"]


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(".a|" * 30, id="plain"),
        pytest.param("....a|" * 30, id="accumulated"),
        pytest.param(".s" + ".a|" * 30, id="one step of another before"),
        pytest.param("aam" + ".a|" * 30, id="others before the first backward pass"),
        pytest.param("a|" * 30, id="no backward pass is seen"),
        pytest.param(".m.a|" * 30, id="a pass for each of two"),
        pytest.param(".ma|" * 30, id="two kinds of parameters"),
        pytest.param(".amsdgz|" * 30, id="one for each parameter"),
        pytest.param(".so|" * 30, id="an outer one that calls an inner one"),
        pytest.param(".d.d.g|" * 30, id="two of the critic to one of the generator"),
        pytest.param(".d.d.d.d.d.g|" * 30, id="five to one"),
        pytest.param((".a|" * 10 + ".s") * 4, id="another once in ten"),
        pytest.param(".a|" * 12 + ".a|.s" * 20, id="another from the middle on"),
        pytest.param(".aaa|" * 30, id="one for several groups of weights"),
        pytest.param(".....a|" * 30, id="a closure that goes backward again and again"),
        pytest.param(".a|" * 3 + "..a|" + ".a|" * 30, id="a pass that failed"),
    ],
)
def test_a_step_ends_where_it_is_meant_to(calls: str) -> None:
    found, steps = heard(calls)
    assert found == meant(calls)
    assert not steps.is_over


def test_calls_of_an_optimizer_twice_an_iteration_are_steps_unless_somebody_says_so() -> None:
    calls = ".a.a|" * 20
    assert len(heard(calls)[0]) == 40
    assert heard(calls, step=2)[0] == meant(calls)


def test_the_class_that_is_named_ends_steps() -> None:
    calls = ".a.a.a.s|" * 20
    assert heard(calls, step="SGD")[0] == meant(calls)
    assert len(heard(calls, step="AdamW")[0]) == 60
    late = ".a" * 11 + ".s|" + (".a" * 11 + ".s|") * 5
    assert heard(late, step="SGD")[0] == meant(late)


def test_nobody_is_told_to_ask_for_the_optimizer_of_another_training() -> None:
    assert "step=" in heard(".a.a.a.s" * 20)[1].notes[0]
    (note,) = heard(".s" * 10 + ".a" * 12)[1].notes
    assert "step=" not in note


def test_a_class_that_never_steps_is_refused_with_those_that_do(golden: Golden) -> None:
    with pytest.raises(StepsError) as error:
        heard(".ma" * 30, step="Lion")
    golden(error)


def test_a_training_that_ends_before_its_steps_is_over() -> None:
    found, steps = heard(".a" * 20 + ".z" * 20)
    assert len(found) == 20
    assert steps.is_over
    # One that is too short to be known by itself.
    found, steps = heard(".a" * 3 + ".z" * 20)
    assert (len(found), steps.is_over) == (3, True)


@pytest.mark.parametrize("first", [8, 20, 100])
def test_of_several_trainings_the_first_counts(first: int) -> None:
    calls = ".d.d.g|" * first
    found, steps = heard(calls + ".a" * 30)
    assert found == meant(calls)
    assert steps.is_over


@given(
    passes=st.integers(1, 5),
    others=st.lists(st.tuples(st.sampled_from("msdgo"), st.integers(1, 7)), max_size=3, unique_by=lambda one: one[0]),
)
def test_the_least_frequent_optimizer_of_a_loop_ends_its_steps(passes: int, others: list[tuple[str, int]]) -> None:
    """Whoever steps several times to its once."""
    step = "." * passes + "".join(f".{name}" * times for name, times in others) + ".a|"
    calls = step * 40
    found, steps = heard(calls)
    assert found == meant(calls)
    assert all("AdamW (40)" in line for line in steps.notes)


@given(st.text(".amsz|", max_size=200), st.sampled_from(["auto", 2, "SGD"]))
def test_steps_end_in_order_and_once_whatever_the_calls_are(calls: str, step: str | int) -> None:
    try:
        found, steps = heard(calls, step)
    except StepsError:
        return
    assert found == sorted(set(found))
    assert steps.num_calls == sum(what in NAMES for what in calls)


def test_what_is_asked_of_calls_is_known_after_a_few() -> None:
    assert not heard(".a" * 7)[1].is_settled
    assert heard(".a" * 9)[1].is_settled


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (".a" * 10, []),
        (".am" * 10, []),
        (".d.d.g" * 10, ["steps are counted by calls of AdamW (10), not of AdamW (20)"]),
        (
            (".a" * 10 + ".s") * 2,
            ["steps are counted by calls of AdamW (20), not of SGD (2): say step= if that is the step"],
        ),
    ],
)
def test_a_reader_hears_how_steps_were_counted_where_that_is_a_choice(calls: str, said: list[str]) -> None:
    assert heard(calls)[1].notes == said
