"""Figures in the sentences of this room: a reason, a refusal, what an update says. ``report/`` draws the tables."""

from __future__ import annotations

from pytest_llmperf.support.units import GIB

_MIB = 2**20
# From here on a rate's first decimal is noise.
_WHOLE_FROM = 100


def figure(value: float, unit: str) -> str:
    """``value`` for people, with its unit: bytes as GiB or MiB, large rates whole, all else to four digits."""
    if unit == "bytes":
        return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / _MIB:.1f} MiB"
    digits = f"{value:,.0f}" if abs(value) >= _WHOLE_FROM else f"{value:.4g}"
    return digits if unit in ("", "1") else f"{digits} {unit}"


def percent(fraction: float) -> str:
    """A change, ``-0.068`` -> ``-6.8 %``."""
    return f"{fraction * 100:+.1f} %"
