"""Finding the largest micro-batch: hints of one process, the word of fresh launches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.batch_size_search import Search
from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.capacity import Fitted, FreshLaunches, SearchDeadline, fit, short
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny", sequence_length=64)


class Card:
    """Trains up to ``most`` in a fresh process; one that has tried other sizes, up to ``used``."""

    def __init__(self, most: int, used: int | None = None, kind: str = "oom", killed: int = 0) -> None:
        self.most, self.used, self.kind = most, most if used is None else used, kind
        self.killed = killed  # launches that die without a word, from the first on
        self.fresh: list[int] = []
        self.tried: list[int] = []

    def launch(self, spec: Spec, number: int) -> Launch:
        self.fresh.append(spec.micro_batch_size)
        assert number == len(self.fresh)
        if len(self.fresh) <= self.killed:
            raise LaunchFailed(spec.id, Failure(kind="killed", message="SIGSEGV", tail=(), folder="there"))
        if spec.micro_batch_size > self.most:
            raise LaunchFailed(spec.id, Failure(kind=self.kind, message="no", tail=(), folder="there"))
        return launch_of(spec, Fake(reserved_bytes=2**20 * (100 + spec.micro_batch_size)))

    def try_sizes(self, _spec: TrainSpec, search: Search) -> list[tuple[int, int | None]]:
        search = replace(search, peaks={}, too_large=set())
        found: list[tuple[int, int | None]] = []
        while (size := search.next()) is not None:
            found.append((size, None if size > self.used else 2**20 * (100 + size)))
            search.note(*found[-1])
        self.tried = [size for size, _ in found]
        return found


def fitted(card: Card, guess: int, *, hints: bool = True, known: bool = False) -> Fitted:
    deadline = SearchDeadline("case", math.inf, lambda _: None, lambda: 0.0)
    fresh, try_sizes = FreshLaunches(SPEC, card.launch), card.try_sizes if hints else None
    return fit(fresh, Search(guess=guess), try_sizes, deadline, known=known)


def test_a_hint_that_is_right_costs_two_launches() -> None:
    card = Card(37)
    found = fitted(card, 36)
    assert (found.size, sorted(card.fresh)) == (37, [37, 38])
    assert found.launch is not None
    assert found.launch.peak_reserved_bytes == 2**20 * 137


@pytest.mark.parametrize("used", [35, 36, 38, 40, 0])
def test_fresh_launches_have_the_last_word(used: int) -> None:
    card = Card(37, used)
    found = fitted(card, 36)
    assert found.size == 37
    assert {37, 38} <= set(card.fresh)


@pytest.mark.parametrize("most", [1025, 1100, 1500, 2000])
def test_a_hint_far_off_costs_few_launches(most: int) -> None:
    card = Card(most, used=1024)
    assert fitted(card, 1).size == most
    assert len(card.fresh) <= 2 * math.log2(most - 1024) + 5


@pytest.mark.parametrize("most", [300, 1000, 1024])
def test_a_hint_that_is_far_too_good_costs_few_launches(most: int) -> None:
    card = Card(most, used=2000)
    assert fitted(card, 1).size == most
    assert len(card.fresh) <= 2 * math.log2(2000) + 3


def test_when_time_is_over_it_gives_up_with_what_it_knows(golden: Golden) -> None:
    card, said = Card(5000, used=1024), list[str]()
    spent = lambda: 40.0 * len(card.fresh)  # noqa: E731 - used twice
    deadline = SearchDeadline("case", 100.0, said.append, spent, clock=spent)
    found = fit(FreshLaunches(SPEC, card.launch), Search(1), card.try_sizes, deadline)
    assert (found.given_up, found.size, found.launch, len(card.fresh)) == (True, 1042, None, 3)
    golden(said)


def test_an_answer_that_is_known_and_still_right_costs_two_launches_and_no_hints() -> None:
    card = Card(37)
    found = fitted(card, 37, known=True)
    assert (found.size, card.fresh, card.tried) == (37, [38, 37], [])
    assert found.launch is not None
    assert found.launch.peak_reserved_bytes == 2**20 * 137


@pytest.mark.parametrize(("most", "launches"), [(38, 2), (39, 3), (60, 3), (36, 3), (20, 4), (1, 4)])
def test_an_answer_that_is_known_and_wrong_costs_hints_and_few_launches_more(most: int, launches: int) -> None:
    card = Card(most)
    assert fitted(card, 37, known=True).size == most
    assert len(card.fresh) <= launches


def test_an_answer_that_is_a_little_too_good_by_now_is_searched_from_there() -> None:
    card = Card(35)
    fitted(card, 37, known=True)
    assert (card.tried[0], card.fresh) == (36, [38, 37, 36, 35])


def test_a_rank_that_dies_without_a_word_gets_a_second_chance() -> None:
    card = Card(37, killed=1)
    assert fitted(card, 36).size == 37
    assert card.fresh == [38, 38, 37]


def test_one_that_dies_twice_is_no_answer() -> None:
    with pytest.raises(LaunchFailed, match="killed"):
        fitted(Card(37, killed=2), 36)


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 200), st.booleans(), st.booleans())
def test_whatever_the_hint_the_answer_is_confirmed(most: int, used: int, guess: int, hints: bool, known: bool) -> None:
    card = Card(most, used)
    assert fitted(card, guess, hints=hints, known=known).size == most
    assert {most, most + 1} <= set(card.fresh)
    assert len(card.fresh) == len(set(card.fresh))


def test_not_even_one() -> None:
    found = fitted(Card(0), 8)
    assert (found.size, found.launch) == (0, None)


def test_other_failures_are_no_answer() -> None:
    with pytest.raises(LaunchFailed):
        fitted(Card(3, kind="error"), 8)


def test_three_full_steps() -> None:
    spec = short(SPEC, 9)
    assert (spec.steps, spec.min_steps, spec.micro_batch_size, spec.capacity_digest) == (3, 3, 9, SPEC.capacity_digest)
