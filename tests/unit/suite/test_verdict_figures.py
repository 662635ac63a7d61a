"""The figures of docs/explanation/noise.md, computed again: from launches measured on H200, and by simulation."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tools.verdicts import UNCONFIRMED, WORLDS, Replays, read, replay, simulate_world

pytestmark = pytest.mark.simulated

DATA = Path(__file__).parents[3] / "docs" / "data"


@pytest.fixture(scope="module", params=["h200-waits.jsonl", "h200-products.jsonl"])
def replays(request: pytest.FixtureRequest) -> Replays:
    return replay(read([DATA / request.param]))


def share(counts: Counter[str], *verdicts: str) -> float:
    return sum(counts[verdict] for verdict in verdicts) / counts.total()


def test_no_alarm_where_nothing_changed(replays: Replays) -> None:
    for verdicts in (replays.same_site, replays.elsewhere, replays.paired):
        assert verdicts[0.0].verdicts.total() >= 4
        assert share(verdicts[0.0].verdicts, "regressed", UNCONFIRMED) == 0


def test_an_unchanged_case_takes_one_launch(replays: Replays) -> None:
    assert sum(replays.launches) / len(replays.launches) < 1.05


def test_five_per_cent_is_found_on_the_same_gpu(replays: Replays) -> None:
    assert share(replays.same_site[0.05].verdicts, "regressed", UNCONFIRMED) >= 0.95


def test_two_per_cent_is_found_in_turns() -> None:
    # Four pairs on each GPU were measured of waits, one or two of products: enough to miss nothing.
    found = {name: replay(read([DATA / f"h200-{name}.jsonl"])).paired[0.02].verdicts for name in ("waits", "products")}
    assert share(found["waits"], "regressed") >= 0.9
    assert found["products"]["pass"] == 0


def test_three_per_cent_of_real_work_is_found_on_the_same_gpu() -> None:
    found = replay(read([DATA / "h200-products.jsonl"])).same_site[0.03].verdicts
    assert share(found, "regressed", UNCONFIRMED) >= 0.8


def test_a_quiet_host_raises_no_alarm_in_a_thousand_gates() -> None:
    quiet = WORLDS[0]
    verdicts = Counter(verdict for verdict, _ in simulate_world(quiet, 1000, 0.0, random.Random("quiet")))
    assert verdicts["regressed"] <= 1
    found = Counter(verdict for verdict, _ in simulate_world(quiet, 200, 0.03, random.Random("slower")))
    assert share(found, "regressed") >= 0.8
