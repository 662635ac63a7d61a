"""Finding the largest micro-batch by fresh launches."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.capacity import Fitted, Search, fit, short
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of

SPEC = TrainSpec(model="llama-tiny", sequence_length=64)


class Card:
    """Trains up to ``most``."""

    def __init__(self, most: int, kind: str = "oom", killed: int = 0) -> None:
        self.most, self.kind = most, kind
        self.killed = killed  # launches that die without a word, from the first on
        self.fresh: list[int] = []

    def launch(self, spec: Spec, number: int) -> Launch:
        self.fresh.append(spec.micro_batch_size)
        assert number == len(self.fresh)
        if len(self.fresh) <= self.killed:
            raise LaunchFailed(spec.id, Failure(kind="killed", message="SIGSEGV", tail=(), folder="there"))
        if spec.micro_batch_size > self.most:
            raise LaunchFailed(spec.id, Failure(kind=self.kind, message="no", tail=(), folder="there"))
        return launch_of(spec, Fake(reserved_bytes=2**20 * (100 + spec.micro_batch_size)))


def fitted(card: Card, guess: int) -> Fitted:
    return fit(SPEC, Search(guess=guess), card.launch, lambda _: True)


def test_a_guess_that_is_right_costs_two_launches() -> None:
    card = Card(37)
    found = fitted(card, 37)
    assert (found.size, found.fails, card.fresh) == (37, 38, [37, 38])
    assert found.launch is not None
    assert found.launch.peak_reserved_bytes == 2**20 * 137


@pytest.mark.parametrize(("most", "launches"), [(38, 5), (39, 5), (60, 11), (36, 2), (35, 3), (20, 8), (1, 8)])
def test_an_answer_that_was_known_and_is_wrong_costs_few_launches_more(most: int, launches: int) -> None:
    card = Card(most)
    assert fitted(card, 37).size == most
    assert len(card.fresh) <= launches


def test_when_time_is_over_it_gives_up_with_what_it_knows() -> None:
    card = Card(5000)
    found = fit(SPEC, Search(1024), card.launch, lambda _: len(card.fresh) < 3)
    assert (found.given_up, found.size, found.launch, len(card.fresh)) == (True, 1041, None, 3)
    assert found.bounds.startswith("1041 ")


def test_a_rank_that_dies_without_a_word_gets_a_second_chance() -> None:
    card = Card(37, killed=1)
    assert fitted(card, 37).size == 37
    assert card.fresh == [37, 37, 38]


def test_one_that_dies_twice_is_no_answer() -> None:
    with pytest.raises(LaunchFailed, match="killed"):
        fitted(Card(37, killed=2), 36)


@given(st.integers(1, 200), st.integers(1, 200))
def test_whatever_the_guess_the_answer_and_one_more_were_launched_once(most: int, guess: int) -> None:
    card = Card(most)
    assert fitted(card, guess).size == most
    assert {most, most + 1} <= set(card.fresh)
    assert len(card.fresh) == len(set(card.fresh))
    assert len(card.fresh) <= 5 + 2 * math.log2(abs(most - guess) + 1) + math.log2(max(most, guess) / 64 + 1)


def test_not_even_one() -> None:
    found = fitted(Card(0), 8)
    assert (found.size, found.launch) == (0, None)


def test_other_failures_are_no_answer() -> None:
    with pytest.raises(LaunchFailed):
        fitted(Card(3, kind="error"), 8)


def test_three_full_steps() -> None:
    spec = short(SPEC, 9)
    assert (spec.steps, spec.min_steps, spec.micro_batch_size, spec.capacity_digest) == (3, 3, 9, SPEC.capacity_digest)
