"""RankDifferences: which rank does what the others do not, and for which one they wait. Pure.

A trace is the mean of its ranks. What one of them does alone, or longer, the others spend in exchanges with it, mostly
beside other work; so neither step times nor what stays exposed say who it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from pytest_llmperf.records.rank_work import Key, RankWork
from pytest_llmperf.records.trace import Trace

# Of a step: exchanges that run beside the backward pass take on some ranks a little longer than on others.
_LEAST_WAIT = 0.05


@dataclass(frozen=True)
class OddRank:
    """One that does what the rank in the middle does not, and did not before."""

    rank: int
    names: tuple[tuple[str, float], ...]
    """And how many more a step, most first."""


@dataclass(frozen=True)
class LastRank:
    """One that comes last to exchanges."""

    rank: int
    waited_seconds: float
    """Of a step, that the others spend in exchanges longer than this one, in the mean."""


def odd_ranks(before: Trace, after: Trace) -> tuple[OddRank, ...]:
    """Those that stand apart now and did not; none where most do."""
    found = []
    as_before = frozenset[Key]() if before.by_rank else _in_both(before, after)
    for rank, work in enumerate(after.by_rank):
        known = _known(before, rank)
        new = [(key[1], more) for key, more in work.apart if known.get(key, 0.0) != more and key not in as_before]
        if new:
            found.append(OddRank(rank, tuple(sorted(new, key=lambda each: (-abs(each[1]), each[0])))))
    return tuple(found) if 2 * len(found) <= len(after.by_rank) else ()


def _known(trace: Trace, rank: int) -> Mapping[Key, float]:
    return dict(trace.by_rank[rank].apart) if rank < len(trace.by_rank) else {}


def _in_both(before: Trace, after: Trace) -> frozenset[Key]:
    """What ran as often in the mean of all ranks, which is all that an older trace tells: no rank began it since."""
    # As many digits as a baseline's file keeps.
    then, now = ({((row.kind, row.name), f"{row.count:.6g}") for row in trace.rows} for trace in (before, after))
    return frozenset(key for key, _ in then & now)


def last_rank(before: Trace, after: Trace) -> LastRank | None:
    """The one that the others wait for, if they wait longer than they did."""
    now, then = _last(after.by_rank), _last(before.by_rank)
    if now is None:
        return None
    waited_then = then.waited_seconds if then and then.rank == now.rank else 0.0
    least = _LEAST_WAIT * after.step_seconds
    # Of older traces only the mean of all ranks is known: half of two wait.
    grown = (_exchange_seconds(after) - _exchange_seconds(before)) * 2
    return now if min(now.waited_seconds - waited_then, grown) > least else None


def _exchange_seconds(trace: Trace) -> float:
    return sum(row.seconds for row in trace.rows if row.kind == "collective")


def _last(ranks: tuple[RankWork, ...]) -> LastRank | None:
    seconds = [work.exchange_seconds for work in ranks]
    if len(seconds) < 2 or not all(seconds):  # noqa: PLR2004 - one rank waits for nobody
        return None
    last = seconds.index(min(seconds))
    others = [each for rank, each in enumerate(seconds) if rank != last]
    return LastRank(last, fmean(others) - seconds[last])
