"""What a training costs."""

from __future__ import annotations

import pytest

from pytest_llmperf.analysis import formulas, ladder
from pytest_llmperf.analysis.ladder import Width

# Table 15.12: GPUs, and the cost efficiency it prints.
PRINTED = {1: 1.00, 2: 0.96, 4: 0.90, 8: 0.88, 16: 0.87, 32: 0.86}
# Table 15.11: total throughput and speed-up.
TOTALS = {2: (92_376, 1.92), 4: (173_728, 3.60), 8: (338_376, 7.01), 16: (669_904, 13.89), 32: (1_325_568, 27.48)}


def test_money_by_hand() -> None:
    assert formulas.tokens_per_price(1000.0, 2.0) == 1_800_000
    assert formulas.price_per_million(1000.0, 2.0) == pytest.approx(1 / 1.8)
    assert formulas.joules_per_token(700.0, 1000.0) == pytest.approx(0.7)


def test_tables_15_11_and_15_12_are_the_chapters() -> None:
    rates = {rung.spec.gpus: rung.published_rate for rung in ladder.LLAMA_WIDTHS}
    assert tuple(rates) == ladder.WIDTHS
    for gpus, rate in rates.items():
        assert rate is not None
        width = Width(gpus, rate, rates[1])
        assert width.efficiency == pytest.approx(PRINTED[gpus], abs=0.0051)
        if gpus in TOTALS:
            assert (width.tokens_per_second, width.speed_up) == pytest.approx(TOTALS[gpus], abs=0.01)


def test_a_width_without_a_figure_says_so() -> None:
    width = Width(4, None, 1000.0)
    assert (width.tokens_per_second, width.speed_up, width.efficiency) == (None, None, None)
    assert Width(4, 1000.0, None).efficiency is None
