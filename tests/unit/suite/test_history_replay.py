"""The tool behind the tables of docs/explanation/history.md."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.judge.case_histories import Scattering
from pytest_llmperf.judge.gpu_panel import Model
from pytest_llmperf.run.history import scattering
from tests.history import NOISE
from tools.history_replay import HOSTS, Tallies, Tally, World, by_case, nights, replayed, simulated, slower

BASELINES = Path(__file__).parents[3] / "baselines"
MACHINE = "nvidia-h200-140gib"


def test_a_change_point_near_the_change_is_found_and_others_are_false() -> None:
    tally = Tally()
    tally.note([], None)
    tally.note([3, 9], None)
    tally.note([12, 20], 10)
    tally.note([30], 10)
    assert tally.row == ("50 %", "100.0", "50.0 %")


def test_only_the_cases_that_change_are_slower_and_from_there_on() -> None:
    results = nights([one.launches for one in BaselineStore(BASELINES).baselines(MACHINE)])
    digest, own = max(by_case(results).items(), key=lambda item: len(item[1]))
    moved = by_case(slower(results, {digest: 3}, 2.0))
    assert [now.step_seconds / then.step_seconds for now, then in zip(moved.pop(digest), own, strict=True)] == (
        pytest.approx([1.0] * 3 + [2.0] * (len(own) - 3))
    )
    assert moved == {name: each for name, each in by_case(results).items() if name != digest}


def test_a_case_that_is_slower_is_found_in_a_simulated_history() -> None:
    known = scattering([MACHINE], BASELINES)[MACHINE]
    model = Model(loadings={f"{number:016x}": Model().loading("") for number in range(3)})
    results = World(model, next(iter(HOSTS)), random.Random(1)).history()
    assert len(results) == 60 * 20
    digest = results[0].digest
    tallies = Tallies(known)
    tallies.note(slower(results, {digest: 30}, 1.05), {digest: 30})
    assert tallies.of["llmperf history"].found == tallies.of["each case alone"].found == 1
    assert tallies.of["llmperf history"].spoilt <= 1


@pytest.mark.slow
@pytest.mark.wide
def test_the_tables_have_a_row_for_each_rule_and_change() -> None:
    model = Model(loadings={"0" * 16: Model().loading("")})
    rows = list(simulated(model, Scattering(NOISE), 1, 1))
    assert len({row[:3] for row in rows}) == len(rows) > len(HOSTS) * 9 * 2
    launches = [one.launches for one in BaselineStore(BASELINES).baselines(MACHINE)]
    assert len(list(replayed(launches, scattering([MACHINE], BASELINES)[MACHINE], 1))) > 10
