"""The options that say what a GPU-hour costs."""

from __future__ import annotations

import argparse
import math

import pytest

from pytest_llmperf.analysis.cost import Price
from pytest_llmperf.support import quantities

_DEFAULT_CURRENCY = "EUR"


def add_options(group: pytest.OptionGroup, parser: pytest.Parser) -> None:
    """Register the command line's and the ini file's."""
    group.addoption("--perf-price", type=_amount, metavar="PRICE", help="of a GPU-hour: costs are told too")
    group.addoption("--perf-currency", type=_name, metavar="NAME", help=f"of the price (default: {_DEFAULT_CURRENCY})")
    parser.addini("perf_price", "price of a GPU-hour, e.g. 2.10", default="")
    parser.addini("perf_currency", f"currency of the price ({_DEFAULT_CURRENCY})", default="")


def read(config: pytest.Config) -> Price | None:
    """What was said; the command line before the ini file.

    Raises:
        pytest.UsageError: a value that cannot be used, in one line.
    """
    price, currency = config.option.perf_price, config.option.perf_currency
    texts = {name: str(config.getini(name)).strip() for name in ("perf_price", "perf_currency")}
    try:
        if price is None and texts["perf_price"]:
            price = _amount(texts["perf_price"])
        if currency is None and texts["perf_currency"]:
            currency = _name(texts["perf_currency"])
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"ini perf_price, perf_currency: {error}") from None
    if price is None and config.option.perf_currency is not None:
        raise pytest.UsageError(
            "--perf-currency says what --perf-price is in; give a price too, e.g. --perf-price 2.10"
        )
    return None if price is None else Price(price, currency or _DEFAULT_CURRENCY)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price of a GPU-hour, e.g. 2.10")
    return value


def _name(text: str) -> str:
    if quantities.currency(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a currency, e.g. EUR")
    return text
