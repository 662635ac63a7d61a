"""Failures: how likely a configuration trains, by what failed and what trained before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import Any

# What has failed once, and never trained, trains one time in three; what has failed twice one time in five.
_WEIGHT = 2.0

_Pair = frozenset[tuple[str, str]]


class Failures:
    """Of one search. A single trait may be what fails, or two together, as Liger's kernels and a compiler do."""

    def __init__(self) -> None:
        self._failed: Counter[_Pair] = Counter()
        self._trained: set[_Pair] = set()

    def note(self, traits: Mapping[str, Any], *, trained: bool) -> None:
        """One with these traits trained, or failed."""
        if trained:
            self._trained.update(_pairs(traits))
        else:
            self._failed.update(_pairs(traits))

    def chance(self, traits: Mapping[str, Any]) -> float:
        """That one with these traits trains."""
        if not self._failed:
            return 1.0
        worst = max((self._failed[pair] for pair in _pairs(traits) if pair not in self._trained), default=0)
        return 1 / (1 + _WEIGHT * worst)


def _pairs(traits: Mapping[str, Any]) -> list[_Pair]:
    words = [(name, str(value)) for name, value in traits.items()]
    return [frozenset(pair) for pair in (*combinations(words, 2), *((word,) for word in words))]
