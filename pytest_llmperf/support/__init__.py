"""What any room may use, and what knows none of them: files written whole, what people type and read, records as files.

May import: nothing of this package. The build reads the version here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

__version__ = "0.1.0"
MADE_BY = f"pytest-llmperf {__version__}"
"""Of what this package has written, for people."""


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key, both in their order."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
