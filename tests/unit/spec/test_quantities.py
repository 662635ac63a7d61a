"""What somebody types: read where it is the quantity, refused where it is none."""

from __future__ import annotations

import argparse
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.support import user_input
from pytest_llmperf.support.user_input import (
    argument,
    count,
    duration_hours,
    is_positive,
    positive,
    size_bytes,
    whole,
)
from tests.golden import Golden


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_every_finite_number_above_0_is_positive(value: float) -> None:
    assert positive(repr(value)) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e999", "many", "0x10"])
def test_what_is_no_positive_number(text: str) -> None:
    assert positive(text) is None


@pytest.mark.parametrize("value", [True, "2", None, [2], math.nan, math.inf, 0, -0.5])
def test_a_value_that_is_no_positive_number(value: object) -> None:
    assert not is_positive(value)


@pytest.mark.parametrize(("text", "value"), [("10080", 10080.0), ("0.5", 0.5), ("10081", None), ("0", None)])
def test_minutes_are_those_of_a_week_at_most(text: str, value: float | None) -> None:
    assert user_input.minutes(text) == value


@given(st.integers(0, 10**18 - 1))
def test_whole_numbers_are_read_back(number: int) -> None:
    assert whole(str(number)) == number
    assert count(str(number)) == (number or None)


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1e3", " 1", "1_000", "٣", "²", "9" * 5000])
def test_what_is_no_whole_number(text: str) -> None:
    assert whole(text) is None


def test_a_whole_number_has_a_least() -> None:
    assert [whole(text, least=1) for text in ("0", "1", "9")] == [None, 1, 9]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64GiB", 64 * 2**30),
        ("64 gib", 64 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5MiB", 3 * 2**19),
        *((text, None) for text in ("64", "64GHz", "0GiB", "-1GiB", "GiB", "64  GiB", "1e2GiB", "64GiB of it")),
    ],
)
def test_a_size_has_its_unit(text: str, expected: int | None) -> None:
    assert size_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("36", 36),
        ("24h", 24),
        ("2d", 48),
        ("1d12h", 36),
        ("90m", 1.5),
        *((text, None) for text in ("0h", "-1h", "2w", "1d nonsense", "h", "")),
    ],
)
def test_a_duration_is_hours(text: str, expected: float | None) -> None:
    assert duration_hours(text) == expected


@given(st.text())
def test_no_text_breaks_a_reader(text: str) -> None:
    for read in (positive, whole, size_bytes, duration_hours):
        value = read(text)
        assert value is None or value >= 0


def test_an_argument_says_what_was_expected(golden: Golden) -> None:
    read = argument(user_input.count, "a number of launches, 1 or more")
    assert read("3") == 3
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        read("0")
    golden(raised)


@pytest.mark.parametrize(
    ("text", "value"), [("0.03", 0.03), ("3 %", 0.03), ("3%", 0.03), ("1", 1.0), ("900 %", 9.0), (" 0.5 ", 0.5)]
)
def test_a_tolerance_is_a_fraction_or_has_its_sign(text: str, value: float) -> None:
    assert user_input.tolerance(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["3", "1.01", "0", "-3 %", "%", "3 % of it", "nan", "inf %", ""])
def test_what_is_no_tolerance(text: str) -> None:
    assert user_input.tolerance(text) is None
