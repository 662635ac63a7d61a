"""RankWork: in what one rank's traced step was not that of the others, which their mean hides; and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from pytest_llmperf.support.codec import Amount, sparse

Key = tuple[str, str]
"""Kind and name of a trace's row."""

# Ranks that all do something else are told by their counts' means; of names that a file has to keep this is enough.
_MOST_NAMES = 20


@sparse("exchange_seconds")
@dataclass(frozen=True)
class RankWork:
    """Of one rank."""

    exchange_seconds: Amount
    """In which its device was in exchanges with other ranks, a step: the longer, the longer it waited in them."""
    apart: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By a row's kind and name, how many more of it than the rank in the middle has, a step; negative: fewer."""

    @property
    def more(self) -> dict[Key, float]:
        """The same by both."""
        return {(kind, name): more for kind, named in self.apart.items() for name, more in named.items()}


def rank_work(counts: Sequence[Mapping[Key, float]], exchange_seconds: Sequence[float]) -> tuple[RankWork, ...]:
    """Of each rank, from the counts of all in their order."""
    names = sorted({name for each in counts for name in each})
    usual = {name: median_low([each.get(name, 0.0) for each in counts]) for name in names}
    found = []
    for own, seconds in zip(counts, exchange_seconds, strict=True):
        apart = [(name, own.get(name, 0.0) - usual[name]) for name in names if own.get(name, 0.0) != usual[name]]
        most = sorted(apart, key=lambda each: -abs(each[1]))[:_MOST_NAMES]
        kinds: dict[str, dict[str, float]] = {}
        for (kind, name), more in sorted(most):
            kinds.setdefault(kind, {})[name] = more
        found.append(RankWork(seconds, kinds))
    return tuple(found)
