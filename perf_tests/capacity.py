"""Where the memory limit is: tasks 15.2, 15.5, 15.7 and 15.9 of the chapter, each a search for its largest micro-batch.

With ``--perf-memory-limit 64GiB`` on the chapter's card, whatever the card is.
"""

from __future__ import annotations

from pytest_llmperf import TrainSpec
from pytest_llmperf.analysis import ladder

_TASKS = ("15.2", "15.5", "15.7", "15.9")


def _of_task(number: str) -> TrainSpec:
    return next(rung.spec for rungs in ladder.LADDERS for rung in rungs if rung.number == number)


CAPACITIES = [_of_task(number) for number in _TASKS]
