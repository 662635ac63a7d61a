"""Searches of what an H200 was measured to do, and of a family left out: figures of docs/explanation/tuning.md."""

from __future__ import annotations

from statistics import fmean

import pytest

from tools.tuning_replay import CHOSEN_ON, GRIDS, by_ascent, by_chance, gap, grid, world
from tools.tuning_world import FAMILIES

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("name", GRIDS)
def test_it_ends_within_one_per_cent_of_the_best_of_a_measured_grid(name: str) -> None:
    found = [gap(grid(name), by_ascent, 240.0, seed) for seed in range(100)]
    assert sum(far <= 0.01 for far, _ in found) >= 95
    assert fmean(launched for _, launched in found) < 14
    by_luck = [gap(grid(name), by_chance, 240.0, seed) for seed in range(100)]
    assert sum(far <= 0.01 for far, _ in by_luck) < 85


@pytest.mark.wide
def test_families_on_which_nothing_was_chosen_end_near_their_best() -> None:
    families = [one for one in FAMILIES if one.name not in CHOSEN_ON][:2]
    found = [gap(world(one, 7), by_ascent, 480.0, 7, anywhere=False)[0] for one in families]
    assert max(found) < 0.05
