"""What a training costs, and which option serves a purpose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.insight import chapter15, cost
from pytest_llmperf.insight.cost import PURPOSES, TIE, Aim, Option, choose
from pytest_llmperf.insight.ladder import Width

# Table 15.12: GPUs, and the cost efficiency it prints.
PRINTED = {1: 1.00, 2: 0.96, 4: 0.90, 8: 0.88, 16: 0.87, 32: 0.86}
# Table 15.11: total throughput and speed-up.
TOTALS = {2: (92_376, 1.92), 4: (173_728, 3.60), 8: (338_376, 7.01), 16: (669_904, 13.89), 32: (1_325_568, 27.48)}

ONE, FOUR, EIGHT = Option("a", 1, 1000.0), Option("b", 4, 900.0), Option("c", 8, 800.0)
OPTIONS = [ONE, FOUR, EIGHT]
HOUR = 3600 * 1000.0  # tokens of one hour on one GPU


def test_money_by_hand() -> None:
    assert cost.tokens_per_price(1000.0, 2.0) == 1_800_000
    assert cost.price_per_million(1000.0, 2.0) == pytest.approx(1 / 1.8)
    assert cost.joules_per_token(700.0, 1000.0) == pytest.approx(0.7)
    option = Option("x", 4, 1000.0, power_watts=2800.0)
    assert (option.hours(HOUR), option.gpu_hours(HOUR)) == (0.25, 1.0)
    assert option.joules_per_token == pytest.approx(0.7)
    assert option.kilowatt_hours(HOUR) == pytest.approx(0.7)
    assert ONE.kilowatt_hours(HOUR) is None


def test_tables_15_11_and_15_12_are_the_chapters() -> None:
    rates = {rung.spec.gpus: rung.published_rate for rung in chapter15.LLAMA_WIDTHS}
    assert tuple(rates) == chapter15.WIDTHS
    for gpus, rate in rates.items():
        assert rate is not None
        width = Width(gpus, rate, rates[1])
        assert (
            width.efficiency == cost.cost_efficiency(rate, rates[1] or 0.0) == pytest.approx(PRINTED[gpus], abs=0.0051)
        )
        if gpus in TOTALS:
            assert (width.tokens_per_second, width.speed_up) == pytest.approx(TOTALS[gpus], abs=0.01)


def test_a_width_without_a_figure_says_so() -> None:
    width = Width(4, None, 1000.0)
    assert (width.tokens_per_second, width.speed_up, width.efficiency) == (None, None, None)
    assert Width(4, 1000.0, None).efficiency is None


class TestChoice:
    @pytest.mark.parametrize(
        ("purpose", "more", "best"),
        [
            ("fastest", {}, EIGHT),
            ("cheapest", {}, ONE),
            ("deadline", {"deadline_hours": 1.0}, ONE),
            ("deadline", {"deadline_hours": 0.5}, FOUR),
            ("deadline", {"deadline_hours": 0.2}, EIGHT),
            ("budget", {"budget": 1.0}, ONE),
            ("budget", {"budget": 1.2}, FOUR),
            ("budget", {"budget": 2.5, "price": 2.0}, EIGHT),
            ("fastest", {"budget": 1.2}, FOUR),
            ("cheapest", {"deadline_hours": 0.2}, EIGHT),
            ("deadline", {"deadline_hours": 0.1}, None),
            ("budget", {"budget": 0.9}, None),
            ("deadline", {"deadline_hours": 0.2, "budget": 1.2}, None),
        ],
    )
    def test_by_hand(self, purpose: str, more: dict[str, float], best: Option | None) -> None:
        assert choose(OPTIONS, Aim(purpose=purpose, tokens=HOUR, **more)).best == best

    def test_a_tie_is_decided_by_what_comes_second(self) -> None:
        same = Option("d", 2, 999.0)
        found = choose([ONE, same], Aim(purpose="cheapest", tokens=HOUR))
        assert (found.best, found.ties) == (same, (ONE,))
        found = choose([EIGHT, Option("e", 9, 800.0 * 8 / 9 * 1.005)], Aim(purpose="fastest", tokens=HOUR))
        assert found.best == EIGHT

    def test_nothing_to_choose_from(self) -> None:
        assert choose([], Aim(purpose="fastest", tokens=1.0)).best is None


_OPTIONS = st.lists(st.builds(Option, st.text(max_size=2), st.integers(1, 64), st.floats(1.0, 1e6)), max_size=6)
_LIMIT = st.none() | st.floats(1e-3, 1e6)


@given(_OPTIONS, st.sampled_from(sorted(PURPOSES)), st.floats(1.0, 1e12), _LIMIT, _LIMIT)
def test_no_other_option_serves_better(
    options: list[Option], purpose: str, tokens: float, deadline_hours: float | None, budget: float | None
) -> None:
    aim = Aim(purpose=purpose, tokens=tokens, deadline_hours=deadline_hours, budget=budget)
    found = choose(options, aim)
    serving = [option for option in options if not aim.too_late(option) and not aim.too_dear(option)]
    assert (found.best is None) == (not serving)
    for option in serving:
        assert found.best is not None
        if PURPOSES[purpose] == "time":
            assert found.best.hours(tokens) <= option.hours(tokens) * (1 + TIE) * (1 + 1e-9)
        else:
            assert aim.cost(found.best) <= aim.cost(option) * (1 + TIE) * (1 + 1e-9)
