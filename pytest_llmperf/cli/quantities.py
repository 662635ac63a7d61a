"""Numbers as somebody types them, for argparse: each refuses what it is not in one line."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping

# No machine of today has more, and a slip of the finger should say so.
_WIDEST = 1_000_000

# Of a day, an hour and a minute.
_HOURS: Mapping[str, float] = {"d": 24.0, "h": 1.0, "m": 1 / 60}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([dhm])")
_TOKENS = re.compile(r"(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)([kMGBT]?)")
_SIZES: Mapping[str, float] = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def duration(text: str) -> float:
    """``36``, ``24h``, ``2d``, ``1d12h``, ``90m``: hours, for argparse."""
    parts = _DURATION.findall(text)
    hours = math.fsum(float(number) * _HOURS[unit] for number, unit in parts)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        hours = amount(text)
    if not 0 < hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time above 0, e.g. 24h, 2d, 1d12h or 90m")
    return hours


def tokens(text: str) -> float:
    """``1e9``, ``300B``, ``1.5T``: for argparse."""
    match = _TOKENS.fullmatch(text.replace(",", "").replace("_", ""))
    value = float(match[1]) * _SIZES[match[2]] if match else math.nan
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of tokens, e.g. 1e9, 300B or 1.5T")
    return value


def amount(text: str) -> float:
    """A price or a budget, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def points(text: str) -> dict[int, float]:
    """``1:72300,2:70100``: GPUs and tokens/s per GPU, for argparse."""
    found: dict[int, float] = {}
    for word in text.split(","):
        gpus, _, rate = word.strip().partition(":")
        value = _number(rate)
        if not gpus.isdecimal() or int(gpus) < 1 or not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{word.strip()!r}: expected GPUS:TOKENS_PER_SECOND_PER_GPU, e.g. 8:69200")
        if int(gpus) in found:
            raise argparse.ArgumentTypeError(f"{gpus} GPUs are given twice, expected once")
        found[int(gpus)] = value
    return found


def widths(text: str) -> list[int]:
    """``16,32,256``: numbers of GPUs, sorted, for argparse."""
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal() or not 1 <= int(word) <= _WIDEST]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r}: expected numbers of GPUs, 1 to {_WIDEST:,}, e.g. 16,32,256")
    return sorted({int(word) for word in words})


def whole(text: str) -> int:
    """A number of GPUs, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= _WIDEST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of GPUs, 1 to {_WIDEST:,}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
