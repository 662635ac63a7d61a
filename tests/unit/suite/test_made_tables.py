"""Each data file of the documentation has the columns that its tool writes; the rows take it minutes."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import bisect_rates, launch_ends, lengths, script_power, unknown_gpus, verdicts
from tools.tables import FOLDER

_NO_MODEL: Any = None

MADE: dict[str, Iterator[tuple[str, ...]]] = {
    "simulated-cases": verdicts.simulate(1, 1),
    "early-ends-simulate": launch_ends.simulated(1, 1),
    "early-ends-late": launch_ends.late(1, 1),
    "early-ends-stored": launch_ends.stored(Path()),
    "unknown-gpus-predictions": unknown_gpus.prediction_rows({}),
    "unknown-gpus-verdicts": unknown_gpus.verdict_rows({}),
    "unknown-gpus-common": unknown_gpus.common_rows({}),
    "unknown-gpus-simulated": unknown_gpus.simulate(1, _NO_MODEL, 1),
    "nights": unknown_gpus.nights(1, _NO_MODEL, 1),
    lengths.NAME: lengths.rows(),
    "bisect": bisect_rates.rates(1),
    "scripts-simulate": script_power.simulated(1, 1),
    "scripts-losses": script_power.banded(1, 1),
}


@pytest.mark.parametrize("name", MADE)
def test_a_made_table_has_the_columns_of_its_tool(name: str) -> None:
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        assert tuple(next(csv.reader(file))) == next(MADE[name])
