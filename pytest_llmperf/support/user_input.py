"""What somebody types, in an option, an ini or a cluster file: quantities (``None``: it is none), and names."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard, TypeVar

_T = TypeVar("_T")

# No count here has more digits, and Python refuses to read thousands of them.
_WHOLE = re.compile(r"[0-9]{1,18}")

_SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s?([a-zA-Z]{2,3})")
_BYTES: Mapping[str, int] = {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)} | {
    f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)
}

# Of a day, an hour and a minute.
_HOURS: Mapping[str, float] = {"d": 24.0, "h": 1.0, "m": 1 / 60}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([dhm])")

_WEEK = 7 * 24 * 60
#: What is longer than a week was meant in seconds, or is a slip: nobody would wait for its end.
A_TIME = f"a number of minutes above 0 and at most {_WEEK} (a week), e.g. 30"

#: What somebody's own tolerance is. Above 1, per cent were meant: 3 would be 300 %, a gate that holds nothing.
A_TOLERANCE = "a positive fraction of at most 1, e.g. 0.03 for 3 %"
#: The same as text, in which a sign says what is meant.
A_WRITTEN_TOLERANCE = f"{A_TOLERANCE}, or per cent with their sign, e.g. 3 %"


def argument(parse: Callable[[str], _T | None], expected: str) -> Callable[[str], _T]:
    """``parse`` as a ``type`` of argparse, which says in one line what was expected."""

    def typed(text: str) -> _T:
        if (value := parse(text)) is None:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
        return value

    return typed


def is_positive(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number above 0; a bool is an int to Python, and never one to a user."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def is_minutes(value: object) -> TypeGuard[float]:
    return is_positive(value) and value <= _WEEK


def is_tolerance(value: object) -> TypeGuard[float]:
    return is_positive(value) and value <= 1


def positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if is_positive(value) else None


def minutes(text: str) -> float | None:
    value = positive(text)
    return value if is_minutes(value) else None


def tolerance(text: str) -> float | None:
    """``0.03``, or ``3 %``; with the sign more than 100 % too, for a machine that is never quiet."""
    number, sign, rest = text.strip().partition("%")
    value = None if rest else positive(number)
    if value is None or (not sign and not is_tolerance(value)):
        return None
    return value / 100 if sign else value


def whole(text: str, least: int = 0) -> int | None:
    """A whole number in digits, ``least`` or more."""
    return int(text) if _WHOLE.fullmatch(text) and int(text) >= least else None


def count(text: str) -> int | None:
    return whole(text, least=1)


def size_bytes(text: str) -> int | None:
    """``64GiB``, ``80 GB``: a size with its unit, above 0."""
    match = _SIZE.fullmatch(text)
    return int(float(match[1]) * _BYTES.get(match[2].upper(), 0)) or None if match else None


def duration_hours(text: str) -> float | None:
    """``36``, ``24h``, ``2d``, ``1d12h``, ``90m``: above 0; without a unit it is hours."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return positive(text)
    hours = math.fsum(float(number) * _HOURS[unit] for number, unit in parts)
    return hours if is_positive(hours) else None


def mail(text: str) -> str | None:
    """Addresses as the program mail takes them, or none: one that begins with - would be an option of it."""
    words = text.replace(",", " ").split()
    return text if text.isprintable() and not any(word.startswith("-") for word in words) else None


#: Likenesses, from 0 to 1: below the first, names have little in common; from the second on, they differ by a slip.
_ALIKE, SLIP = 0.5, 0.8
# What begins alike was meant before what only shares letters: 'adamww' is an Adam.
_STEM = 3


def nearest(name: str, known: Iterable[str], at_least: float = _ALIKE) -> str | None:
    """The one of ``known`` that ``name``, in whatever case, is most like; ``None`` where all are less alike."""
    name, names = name.lower(), {each.lower(): each for each in known}
    if not (matches := difflib.get_close_matches(name, names, n=max(1, len(names)), cutoff=at_least)):
        return None
    best = matches[0]
    if difflib.SequenceMatcher(None, best, name).ratio() < SLIP:
        akin = max((each for each in names if each in matches), key=lambda each: _shared_start(name, each))
        best = akin if _shared_start(name, akin) >= _STEM else best
    return names[best]


def from_here(path: Path) -> str:
    """`` from /home/me``, to go behind what was not found at a relative path."""
    with suppress(OSError):  # the working directory may be gone
        return "" if path.is_absolute() else f" from {Path.cwd()}"
    return ""


def hint(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'liger'?)``, to go behind the name; empty where nobody can tell."""
    found = nearest(name, known)
    return f" (did you mean {found!r}?)" if found else ""


def _shared_start(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
