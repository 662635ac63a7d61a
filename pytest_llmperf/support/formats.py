"""Numbers for people. Bytes and seconds come in; a figure that is absent or not finite is a dash."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

ABSENT = "-"

#: Bytes.
GIB = 2**30
_KIB, _MIB = 2**10, 2**20
_MINUTE, _HOUR = 60, 3600
# From here on a figure's first decimal is noise.
_WHOLE_FROM = 100
# A count, of which one more on one rank of many is to be seen.
_COUNT_FROM = 100.0


def tokens_per_second(value: float | None) -> str:
    """``71783`` -> ``71,783``; a slow CPU's rate keeps its decimals."""
    if not _finite(value):
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= _WHOLE_FROM else f"{value:.3g}"


def compact(value: float | None) -> str:
    """``71783`` -> ``71.8k``."""
    if not _finite(value):
        return ABSENT
    # The bounds are where three digits would round to four.
    for bound, divisor, suffix in ((999.5, 1, ""), (999_500, 1e3, "k"), (999.5e6, 1e6, "M"), (math.inf, 1e9, "G")):
        if abs(value) < bound:
            return f"{value / divisor:.3g}{suffix}"
    return ABSENT


def first_n(names: Sequence[str], most: int) -> str:
    """``a, b and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def memory(num_bytes: float | None, decimals: int = 1) -> str:
    """``56480000000`` -> ``52.6 GiB``; below one GiB in MiB, and so on."""
    if not _finite(num_bytes):
        return ABSENT
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.{decimals}f} GiB"
    unit, name = (_MIB, "MiB") if abs(num_bytes) >= _MIB else (_KIB, "KiB")
    scaled = num_bytes / unit
    return f"{scaled:.{decimals if abs(scaled) < _WHOLE_FROM else decimals - 1}f} {name}"


def percent(fraction: float | None) -> str:
    """A change: ``0.0123`` -> ``+1.2 %``."""
    if not _finite(fraction):
        return ABSENT
    text = f"{fraction * 100:+.1f} %"
    # Neither sign is true of what rounds to nothing.
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def share(fraction: float | None) -> str:
    """A part of a whole, or a bound: ``0.571`` -> ``57.1 %``."""
    return f"{fraction * 100:.1f} %" if _finite(fraction) else ABSENT


def seconds(value: float | None) -> str:
    """``14.2`` -> ``14.2 s``, ``212.4`` -> ``212 s``, ``8040`` -> ``2 h 14 min``."""
    if not _finite(value):
        return ABSENT
    if abs(value) < 10 * _MINUTE:
        return f"{value:.3g} s"
    minutes = round(value / _MINUTE)
    return f"{minutes} min" if abs(value) < _HOUR else f"{minutes // 60} h {minutes % 60:02d} min"


def counted(number: int, noun: str) -> str:
    """``1 trial``, ``2,000 trials``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def elapsed(value: float) -> str:
    """A clock that ticks in whole seconds: ``14.9`` -> ``14 s``."""
    return seconds(math.floor(value)) if math.isfinite(value) else ABSENT


def figure(value: float | None, unit: str) -> str:
    """A value in the unit a person reads; memory with two decimals, so that a value and its limit differ."""
    if not _finite(value):
        return ABSENT
    if unit in BY_UNIT:
        return BY_UNIT[unit](value)
    if unit == "1" and abs(value) >= _COUNT_FROM:
        return f"{value:,.7g}"
    return f"{value:.5g}" if unit in ("", "1") else f"{value:.5g} {unit}"


def in_sentence(value: float, unit: str, *beside: float | None) -> str:
    """A value with its unit, as a reason has it: bytes as GiB, MiB or KiB, large rates whole, others to four digits.
    Bytes are whole where another value ``beside`` them would read the same."""
    if unit == "bytes":
        text = in_sentence(value, unit) if beside else ""
        if any(each not in (None, value) and in_sentence(each or 0.0, unit) == text for each in beside):
            return f"{value:,.0f} bytes"
        if value < _MIB:
            return f"{value / _KIB:.0f} KiB"
        return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / _MIB:.1f} MiB"
    if unit == "1" and abs(value) >= _COUNT_FROM:
        return f"{value:,.7g}"
    digits = f"{value:,.0f}" if abs(value) >= _WHOLE_FROM else f"{value:.4g}"
    return digits if unit in ("", "1") else f"{digits} {unit}"


def change_of(amount: float, unit: str) -> str:
    """How much more or less, with its sign: ``+0.40 GiB``, ``-1.2 TFLOP``, ``+33``."""
    size = abs(amount)
    text = memory(size, decimals=2) if unit == "bytes" else flops(size) if unit == "FLOP" else f"{size:,.7g}"
    return f"{'-' if amount < 0 else '+'}{text}"


def flops(value: float) -> str:
    """``112066434170880`` -> ``112 TFLOP``."""
    for size, name in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if abs(value) >= size:
            return f"{value / size:.4g} {name}"
    return f"{value:,.0f} FLOP"


#: How values of these units are shown.
BY_UNIT: Mapping[str, Callable[[float], str]] = {
    "bytes": lambda value: memory(value, decimals=2),
    "s": seconds,
    "tokens/s": tokens_per_second,
    "FLOP": flops,
    "J/token": lambda value: f"{value * 1000:.3g} mJ/token",
}


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
