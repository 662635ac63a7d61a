"""Numbers and text for people."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.metrics import formatted, label
from pytest_llmperf.report.text import ASCII, UNICODE, fold, glyphs_of, one_line, rate_heading, shorten_middle
from pytest_llmperf.support import formats


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.tokens_per_second(71783), "71,783"),
        (formats.tokens_per_second(99.94), "99.9"),
        (formats.tokens_per_second(0.25), "0.25"),
        (formats.compact(71783), "71.8k"),
        (formats.compact(812), "812"),
        (formats.compact(999_400), "999k"),
        (formats.compact(999_960), "1M"),
        (formats.compact(1_234_567), "1.23M"),
        (formats.compact(2.5e9), "2.5G"),
        (formats.memory(52.6 * 2**30), "52.6 GiB"),
        (formats.memory(52.614 * 2**30, decimals=2), "52.61 GiB"),
        (formats.memory(312.4 * 2**20), "312 MiB"),
        (formats.memory(3.21 * 2**20), "3.2 MiB"),
        (formats.memory(0), "0.0 KiB"),
        (formats.percent(0.0123), "+1.2 %"),
        (formats.percent(-0.0618), "-6.2 %"),
        (formats.percent(-0.0001), "0.0 %"),
        (formats.share(0.571), "57.1 %"),
        (formats.seconds(0.05714), "0.0571 s"),
        (formats.seconds(14.24), "14.2 s"),
        (formats.seconds(212.4), "212 s"),
        (formats.seconds(1500), "25 min"),
        (formats.seconds(8040), "2 h 14 min"),
        (formats.elapsed(14.9), "14 s"),
        (formats.in_sentence(47_104, "bytes", 65_536), "46 KiB"),
        (formats.in_sentence(47_104, "bytes", 47_104, None), "46 KiB"),
        (formats.in_sentence(47_300, "bytes", 47_300, None, 47_104), "47,300 bytes"),
        (formatted("mfu", 0.571, "1"), "57.1 %"),
        (formatted("final_loss", 6.43219, "1"), "6.4322"),
        (formatted("joules_per_token", 0.0123, "J"), "0.0123 J"),
        (label("peak_reserved_bytes"), "peak memory"),
        (label("my_metric"), "my_metric"),
    ],
)
def test_figures_read_as_a_person_writes_them(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_absent_is_a_dash(value: float | None) -> None:
    shown = {f(value) for f in (formats.tokens_per_second, formats.compact, formats.memory, formats.percent)}
    shown |= {formats.share(value), formats.seconds(value), formatted("mfu", value, "1")}
    assert shown == {"-"}


@given(st.floats(min_value=1, max_value=1e11))
def test_a_compact_rate_is_short(value: float) -> None:
    assert len(formats.compact(value)) <= 6


@pytest.mark.parametrize(("encoding", "glyphs"), [("utf-8", UNICODE), ("ascii", ASCII), (None, ASCII), ("none", ASCII)])
def test_marks_outside_ascii_need_an_encoding_that_has_them(encoding: str | None, glyphs: object) -> None:
    assert glyphs_of(encoding) == glyphs


@given(st.text(), st.sampled_from(["utf-8", "ascii", "latin-1", None, "no-such-encoding"]))
def test_one_line_is_one_line_that_can_be_written(text: str, encoding: str | None) -> None:
    line = one_line(text, encoding)
    assert len(line.splitlines()) <= 1
    assert "\x1b" not in line
    line.encode(encoding if encoding in ("utf-8", "latin-1") else "ascii")


@given(st.text("ab-/ ", max_size=80), st.integers(1, 40), st.sampled_from(["", "  "]))
def test_folding_fits_and_loses_nothing_but_spaces(text: str, width: int, indent: str) -> None:
    lines = fold(text, width, indent)
    assert all(len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_an_id_folds_at_its_hyphens() -> None:
    assert fold("llama-3.2-1b-bf16-sdpa-liger", 14) == ["llama-3.2-1b-", "bf16-sdpa-", "liger"]


@pytest.mark.parametrize(
    ("cells", "heading"),
    [
        (["640 steps/s", "-"], "rate"),
        (["640", "640 steps/s"], "tokens/s/GPU"),
        (["-"], "tokens/s/GPU"),
        ([], "tokens/s/GPU"),
    ],
)
def test_a_column_of_rates_is_headed_by_what_they_are(cells: list[str], heading: str) -> None:
    """Those that are no tokens' say their unit."""
    assert rate_heading(cells) == heading


def test_without_a_width_nothing_folds() -> None:
    assert fold("x " * 500, None) == ["x " * 500]


@given(st.text("abc"), st.integers(-2, 40), st.sampled_from(["…", "..."]))
def test_shortening_fits_and_keeps_both_ends(text: str, width: int, ellipsis: str) -> None:
    short = shorten_middle(text, width, ellipsis)
    assert len(short) <= max(width, 0)
    if len(text) <= width:
        assert short == text
    elif ellipsis in short:
        head, tail = short.split(ellipsis)
        assert text.startswith(head)
        assert text.endswith(tail)
