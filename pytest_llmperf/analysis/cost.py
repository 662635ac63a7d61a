"""What a training costs in money, by the GPU-hour in any one currency, and in energy. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_HOUR = 3600
_MILLION = 1e6


@dataclass(frozen=True)
class Price:
    """Of a GPU-hour."""

    gpu_hour: float
    currency: str


def tokens_per_price(rate: float, price: float) -> float:
    """Tokens for one unit of money, at ``rate`` tokens/s per GPU and ``price`` of a GPU-hour."""
    return rate * _HOUR / price


def price_per_million(rate: float, price: float) -> float:
    return _MILLION / tokens_per_price(rate, price)


def joules_per_token(power_watts: float, tokens_per_second: float) -> float:
    """Of all GPUs together: their power over their rate."""
    return power_watts / tokens_per_second
