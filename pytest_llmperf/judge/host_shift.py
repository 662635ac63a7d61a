"""What the cases of a run have in common: whether they moved together."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pytest_llmperf.records.metrics import RATE
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.support.formats import percent

# Of fewer cases "most" means nothing, and a shift within the noise of hosts is no news.
_FEWEST, _MOST, _NEWS = 4, 0.75, 0.005


def host_shift(results: Sequence[CaseResult]) -> str:
    """A line where most cases moved in one direction and by like amounts; else empty.

    It explains and excuses nothing: a slower library looks the same.
    """
    changes = [
        check.change
        for result in results
        if not result.shared_launches and (check := result.check(RATE)) is not None and check.change is not None
    ]
    if len(changes) < _FEWEST:
        return ""
    centre = median(changes)
    together = [change for change in changes if change * centre > 0 and abs(change - centre) <= abs(centre)]
    if abs(centre) < _NEWS or len(together) < _MOST * len(changes):
        return ""
    return (
        f"host shift: {len(together)} of {len(changes)} cases moved together, by {percent(centre)} in the middle: "
        "look at the machine, the driver or a library they share; --perf-against compares with another environment "
        "on the same hardware"
    )
