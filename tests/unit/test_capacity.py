"""The search for the largest micro-batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.capacity import LARGEST, Search

GIB = 2**30


def found(answer: int, guess: int, *, limit: int = 0, fixed: float = 10 * GIB) -> tuple[Search, int]:
    """A search against a machine that takes ``answer`` at most, and how many sizes it tried."""
    each = (64 * GIB - fixed) / (answer + 0.5)
    search, tries = Search(guess=guess, limit_bytes=limit), 0
    while (size := search.next()) is not None:
        tries += 1
        assert tries < 200
        assert size >= 1
        search.note(size, None if size > answer else int(fixed + each * size))
    return search, tries


@given(st.integers(1, 5000), st.integers(1, 5000), st.booleans())
def test_finds_it_to_the_unit_wherever_it_begins(answer: int, guess: int, told: bool) -> None:
    search, _ = found(answer, guess, limit=64 * GIB if told else 0)
    assert (search.fits, search.fails) == (answer, answer + 1)


@given(st.integers(8, 2000), st.floats(0.97, 1.03))
def test_a_good_prediction_takes_few_tries(answer: int, error: float) -> None:
    _, tries = found(answer, max(1, round(answer * error)), limit=64 * GIB)
    assert tries <= 8


@pytest.mark.parametrize(
    ("guess", "most"), [(100, 2), (99, 3), (98, 4), (101, 3), (90, 5), (110, 6), (1, 9), (1000, 9)]
)
def test_what_a_guess_costs(guess: int, most: int) -> None:
    _, tries = found(100, guess, limit=64 * GIB)
    assert tries <= most


@given(st.integers(1, 3000), st.floats(0.5, 2.0))
def test_a_line_that_is_off_costs_a_logarithm_of_tries(answer: int, off: float) -> None:
    _, tries = found(answer, 1, limit=int(off * 64 * GIB))
    assert tries <= 6 + 3 * math.log2(answer + 1)


@given(st.integers(1, 3000))
def test_knowing_nothing_it_takes_a_logarithm_of_tries(answer: int) -> None:
    _, tries = found(answer, 1)
    assert tries <= 3 + 2 * math.log2(answer + 1)


def test_where_one_does_not_fit() -> None:
    search = Search(guess=5)
    while (size := search.next()) is not None:
        search.note(size, None)
    assert (search.fits, search.fails, search.found) == (0, 1, True)


def test_where_nothing_is_too_large_it_ends() -> None:
    search = Search(guess=1)
    while (size := search.next()) is not None:
        search.note(size, GIB)
    assert search.fits == LARGEST
    assert not search.found


@pytest.mark.parametrize("first", [True, False])
def test_the_last_word_counts(first: bool) -> None:
    search = Search()
    search.note(8, GIB if first else None)
    search.note(8, None if first else GIB)
    assert (search.fits, search.fails) == ((0, 8) if first else (8, None))
