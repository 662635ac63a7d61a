"""Straggling: the rank, and its node, that holds the others up, and by how much; what all of them wait for. Pure.

Ranks that meet in every step (DDP's all-reduce) all take the slowest one's time. Each rank's own work is its steps less
what it waited for the exchange of gradients, where the record has that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trace import SPENT, Trace, by_text, shown_place, without_lines

# Less is no news, however well it is known: GPUs of one host scatter by 0.6 % (sd), so the slowest of eight is 0.9 %
# behind the middle, and of 32 it is 1.2 %.
_NEWS = 0.02
# Of a step: a CPU's idle moments scatter by less.
_LONGER = 0.25
# In standard errors of the difference.
_BEYOND = 4.0
# Of a median over that of a mean.
_MEDIAN = math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Straggler:
    """The slowest rank of a launch."""

    rank: int
    host: str
    device: str
    share: float
    """By how much it takes longer than the rank in the middle of the others, a fraction."""
    error: float
    """Standard error of ``share``; 0 where a rank has one figure only."""


def by_work(launch: Launch) -> Straggler | None:
    """By the median of what each rank works in the steady steps; ``None`` of one rank."""
    if len(launch.ranks) == 1:
        return None
    # A rank that does not tell its waits would seem to work while it waits.
    told = _all_tell(launch)
    seconds, errors = {}, {}
    for rank in launch.ranks:
        steps = (rank.working_seconds if told else rank.step_seconds)[launch.steady.start :]
        seconds[rank.rank] = median(steps)
        # Relative, of the median; of a single step nothing is known.
        known = len(steps) > 1
        errors[rank.rank] = _MEDIAN * stdev(steps) / fmean(steps) / math.sqrt(len(steps)) if known else math.inf
    slowest = max(launch.ranks, key=lambda rank: seconds[rank.rank])
    others = [number for number in seconds if number != slowest.rank]
    middle = median(seconds[number] for number in others)
    # The middle of several is better known than any of them: this errs on the quiet side.
    error = math.hypot(errors[slowest.rank], median(errors[number] for number in others))
    return Straggler(slowest.rank, slowest.host, slowest.device, seconds[slowest.rank] / middle - 1, error)


def held_up(launches: Sequence[Launch]) -> tuple[str, ...]:
    """A line where one rank, on the same device, was slower in every launch."""
    slowest = filter(None, map(by_work, launches))
    told = [one for one in slowest if one.share > max(_NEWS, _BEYOND * one.error)]
    if not told or len(told) < len(launches) or len({(one.rank, one.device) for one in told}) > 1:
        return ()
    last, percent = told[-1], f"{median(one.share for one in told) * 100:.1f} %"
    line = f"holds the others up: it works {percent} longer on a step than the rank in the middle"
    return (f"rank {last.rank} ({last.host}, {last.device}) {line}",)


def communication_share(launch: Launch) -> float | None:
    """What of the median steady step ranks wait for one another with nothing left to compute, a fraction. Of the rank
    that waits least in a step: the others wait for that one as well. ``None`` where ranks do not tell."""
    if not _all_tell(launch):
        return None
    least = [min(waits) for waits in zip(*(rank.waiting_seconds for rank in launch.ranks), strict=True)]
    return float(median(least[launch.steady.start :])) / launch.median_step_seconds


def _all_tell(launch: Launch) -> bool:
    return all(rank.waiting_seconds for rank in launch.ranks)


# Waits for data: for how long a step's device did nothing, because its host was inside the loader.
def data_wait(launches: Sequence[Launch]) -> tuple[float, float] | None:
    """Of the middle one of the traced launches: seconds, and the share of a step. On a CPU all of the wait."""
    if not (traces := [launch.trace for launch in launches if launch.trace and launch.trace.step_seconds > 0]):
        return None
    return median(one.data_seconds for one in traces), median(one.data_seconds / one.step_seconds for one in traces)


def host_spends(before: Trace, after: Trace) -> Iterator[str]:
    """The line at which the host spends most of what a step takes longer, beyond what work takes longer: ``the host
    spends 50.0 ms a step more at data.py:7 (`time.sleep(0.05)`)``."""
    then, now = (by_text(trace.places.get(SPENT, {})) for trace in (before, after))
    slower = max(1.0, after.busy_seconds / max(before.busy_seconds, 1e-9))
    more = after.step_seconds - slower * before.step_seconds
    if not then or more < _LONGER * slower * before.step_seconds:
        return
    for place in after.places.get(SPENT, {}):
        seconds = now[without_lines(place)] - slower * then.get(without_lines(place), 0.0)
        if 2 * seconds >= more:
            yield f"the host spends {seconds * 1000:,.1f} ms a step more at {shown_place(place)}"
            return
