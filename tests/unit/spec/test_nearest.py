"""Which known name was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.settings.optimizer import OPTIMIZERS
from pytest_llmperf.support.user_input import hint, nearest
from tests.golden import Golden

NAMES = st.lists(st.text("abcdef-_0123456789", min_size=1, max_size=12), min_size=1, max_size=8, unique=True)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("adamww", OPTIMIZERS, "adamw_torch"),  # begins alike, though 'adamww' shares more letters with 'adamw_8bit'
        ("adamw_torch_fuse", OPTIMIZERS, "adamw_torch_fused"),
        ("SDPA", ["eager", "sdpa"], "sdpa"),
        ("liger", ["Liger", "eager"], "Liger"),
        ("liger", ["gpus"], None),
        ("", ["gpus"], None),
        ("gpus", [], None),
    ],
)
def test_the_nearest(name: str, known: list[str], expected: str | None) -> None:
    assert nearest(name, known) == expected


@given(NAMES)
def test_a_known_name_is_its_own_nearest(known: list[str]) -> None:
    assert [nearest(name, known) for name in known] == known


@given(st.text(max_size=12), NAMES)
def test_whoever_wants_one_gets_one(name: str, known: list[str]) -> None:
    assert nearest(name, known, at_least=0.0) in known


def test_a_hint_goes_behind_the_name(golden: Golden) -> None:
    golden(hint("lger", ["liger"]))
    assert not hint("x", ["liger"])
