"""The README's picture is of what is stored today, and each of its colours has one for a dark page."""

from __future__ import annotations

import re

import pytest

from pytest_llmperf.judge.baseline import BaselineStore
from tests.frozen.test_specs import REPOSITORY
from tools.pictures import ladder

DRAWN = (REPOSITORY / "docs" / "pictures" / "ladder.svg").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows() -> tuple[list[ladder.Row], list[ladder.Row]]:
    return ladder.rows(BaselineStore(REPOSITORY / "baselines"))


def test_it_has_the_figures_of_both_ladders(rows: tuple[list[ladder.Row], list[ladder.Row]]) -> None:
    chapter, tuned = rows
    assert min(len(chapter), len(tuned)) >= 8
    missing = [row["figures"] for row in (*chapter, *tuned) if f">{row['figures']}<" not in DRAWN]
    assert not missing, "python -m tools.pictures --only ladder"


def test_an_interval_is_around_each_stored_rate_alone(rows: tuple[list[ladder.Row], list[ladder.Row]]) -> None:
    for row in (*rows[0], *rows[1]):
        assert (row["low"] < row["rate"] < row["high"]) == ("±" in row["figures"])


def test_each_colour_has_another_on_a_dark_page() -> None:
    style, _, picture = DRAWN.partition("</style>")
    used = {*re.findall(r'(?:fill|stroke)="(#[^"]+|white|black)"', picture)}
    assert used == {*ladder.DARK}
    assert all(f'[fill="{light}"]{{fill:{dark}}}' in style for light, dark in ladder.DARK.items())
