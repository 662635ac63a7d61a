"""Searches of what an H200 was measured to do, in 100 random orders: figures of docs/explanation/tuning.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.tuning_grid import read
from tools.tuning_replay import Grid, by_chance, by_surrogate, replayed

pytestmark = pytest.mark.simulated

_GRIDS = sorted((Path(__file__).parents[3] / "docs" / "data").glob("h200-grid-*.jsonl"))


@pytest.mark.parametrize("path", _GRIDS, ids=lambda path: path.stem)
def test_it_ends_within_one_per_cent_of_the_best_of_a_measured_grid(path: Path) -> None:
    grid = Grid(read(path))
    assert len(grid.rows) >= 60
    share, gap, launched = replayed(grid, by_surrogate, 400.0, orders=100)
    assert share >= 0.9
    assert gap < 0.01
    assert launched < len(grid.rows) / 3
    by_luck, _, _ = replayed(grid, by_chance, 400.0, orders=100)
    assert share > by_luck + 0.15
