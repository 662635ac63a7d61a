"""The search for the largest micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.run.capacity import LARGEST, Search

GIB = 2**30


def found(
    answer: int,
    guess: int,
    *,
    limit: int = 0,
    fixed: float = 10 * GIB,
    knows: int = 0,
    peak: Callable[[int], int] | None = None,
) -> tuple[Search, int]:
    """A search against a machine that takes ``answer`` at most, and how many sizes it tried.

    Of one size (``knows``) it has been told whether it fits; ``peak`` is what each size is seen to take.
    """
    each = (64 * GIB - fixed) / (answer + 0.5)
    search, tries = Search(guess=guess, limit_bytes=limit), 0

    def tell(size: int) -> None:
        seen = peak(size) if peak else int(fixed + each * size)
        search.note(size, None if size > answer else seen)

    if knows:
        tell(knows)
    while (size := search.next()) is not None:
        tries += 1
        assert tries < 200
        assert size >= 1
        tell(size)
    return search, tries


@given(st.integers(1, 5000), st.integers(1, 5000), st.booleans())
def test_finds_it_to_the_unit_wherever_it_begins(answer: int, guess: int, told: bool) -> None:
    search, _ = found(answer, guess, limit=64 * GIB if told else 0)
    assert (search.fits, search.fails) == (answer, answer + 1)


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_without_peaks_the_tries_grow_with_the_logarithm_of_what_the_guess_is_off_by(answer: int, guess: int) -> None:
    _, tries = found(answer, guess)
    off, stride = abs(answer - guess) + 1, max(answer, guess) / 64 + 1
    assert tries <= 4 + 2 * math.log2(off) + math.log2(stride)


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.lists(st.integers(0, 64 * GIB), min_size=1, max_size=20))
def test_whatever_the_peaks_tell_the_tries_are_bounded(answer: int, guess: int, peaks: list[int]) -> None:
    search, tries = found(answer, guess, limit=64 * GIB, peak=lambda size: peaks[size % len(peaks)])
    assert (search.fits, search.fails) == (answer, answer + 1)
    assert tries <= 4 + 3.5 * math.log2(max(answer, guess) + 1)


def test_one_size_that_fits_tells_what_each_more_takes() -> None:
    search = Search(guess=16, limit_bytes=10)
    search.note(16, None)
    search.note(4, 4)
    assert search.next() == 10


@pytest.mark.parametrize(
    ("answer", "told", "untold"),
    # As one launch of 257 trained, which one process had told not to. With nothing else known it took, one by one and
    # doubling, 3, 3, 5, 9, 13, 17 and 19 launches more.
    [(258, 2, 4), (259, 3, 4), (261, 3, 4), (273, 3, 7), (321, 3, 10), (513, 3, 13), (957, 4, 16)],
)
def test_what_it_costs_that_a_hint_was_too_careful(answer: int, told: int, untold: int) -> None:
    assert found(answer, 8, limit=64 * GIB, knows=257)[1] <= told
    assert found(answer, 8, knows=257)[1] <= untold


@pytest.mark.parametrize("answer", [255, 252, 240, 192, 128, 8])
def test_what_it_costs_that_a_hint_was_too_good(answer: int) -> None:
    assert found(answer, 8, limit=64 * GIB, knows=256)[1] <= 9
    assert found(answer, 8, knows=256)[1] <= 10


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
    assert (search.fits, search.fails, search.next()) == (0, 1, None)


def test_where_nothing_is_too_large_it_ends() -> None:
    search = Search(guess=1)
    while (size := search.next()) is not None:
        search.note(size, GIB)
    assert search.fits == LARGEST
    assert search.fails is None


@pytest.mark.parametrize("first", [True, False])
def test_the_last_word_counts(first: bool) -> None:
    search = Search()
    search.note(8, GIB if first else None)
    search.note(8, None if first else GIB)
    assert (search.fits, search.fails) == ((0, 8) if first else (8, None))
