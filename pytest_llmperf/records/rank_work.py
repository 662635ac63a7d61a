"""RankWork: in what one rank's traced step was not that of the others, which their mean hides; and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

Key = tuple[str, str]
"""Kind and name of a trace's row."""

# Ranks that all do something else are told by their counts' means; of names that a file has to keep this is enough.
_MOST_NAMES = 20


@dataclass(frozen=True)
class RankWork:
    """Of one rank."""

    exchange_seconds: float = 0.0
    """In which its device was in exchanges with other ranks, a step: the longer, the longer it waited in them."""
    apart: tuple[tuple[Key, float], ...] = ()
    """How many more of a row than the rank in the middle has, a step; negative: fewer. Sorted."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        kinds: dict[str, dict[str, float]] = {}
        for (kind, name), more in self.apart:
            kinds.setdefault(kind, {})[name] = more
        return {"exchange_seconds": self.exchange_seconds, **({"apart": kinds} if kinds else {})}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankWork:
        """As ``to_dict`` wrote it.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: it was not.
        """
        kinds = values.get("apart", {})
        apart = sorted(((kind, name), float(more)) for kind, named in kinds.items() for name, more in named.items())
        seconds = float(values["exchange_seconds"])
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"{seconds} s in exchanges")
        return cls(seconds, tuple(apart))


def rank_work(counts: Sequence[Mapping[Key, float]], exchange_seconds: Sequence[float]) -> tuple[RankWork, ...]:
    """Of each rank, from the counts of all in their order."""
    names = sorted({name for each in counts for name in each})
    usual = {name: median_low([each.get(name, 0.0) for each in counts]) for name in names}
    found = []
    for own, seconds in zip(counts, exchange_seconds, strict=True):
        apart = [(name, own.get(name, 0.0) - usual[name]) for name in names if own.get(name, 0.0) != usual[name]]
        most = sorted(apart, key=lambda each: -abs(each[1]))[:_MOST_NAMES]
        found.append(RankWork(seconds, tuple(sorted(most))))
    return tuple(found)
