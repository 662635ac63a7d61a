"""What is lifted from a rank's log."""

from __future__ import annotations

import pytest

from pytest_llmperf.launch.outcome import remarks_in


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[rank0]:[W1125 05:02:44.123456 ProcessGroup.cpp:1234] slow path", "slow path"),
        ("/a/b.py:12: UserWarning: xformers is not installed", "xformers is not installed"),
        ("[transformers] `f` is falling back to its reference", "[transformers] `f` is falling back to its reference"),
        ("\x1b[31mfallback\x1b[0m to\u202eeager", "fallback to eager"),
        (
            "fallback: HF_TOKEN=abc https://u:p@host --password hunter2 hf_abcdefghijklmnopqr",
            "fallback: HF_TOKEN=<set> https://<set>@host --password <set> <set>",
        ),
    ],
)
def test_a_slower_way_is_told_without_what_differs_each_time_or_is_secret(line: str, said: str) -> None:
    assert remarks_in([line, line]) == (said,)


def test_other_lines_are_left_and_the_rest_is_bounded() -> None:
    assert remarks_in(["Setting OMP_NUM_THREADS", "Loading weights: 100%", ""]) == ()
    found = remarks_in(f"falling back {number} {'x' * 999}" for number in range(99))
    assert len(found) == 5
    assert max(map(len, found)) <= 240
