"""Watcher: what is seen of a search while it runs: a line for each trial."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_llmperf.cli.check.terminal import Terminal
from pytest_llmperf.engine.tuning.order import TuningOrder
from pytest_llmperf.engine.tuning.tuner import Standing
from pytest_llmperf.engine.tuning.tuning import Tried
from pytest_llmperf.report.progress_line import LaunchLines, Numbered
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import formats


class Watcher(Terminal):
    """On standard error: what is printed as the answer stays by itself."""

    def __init__(self, order: TuningOrder) -> None:
        self._told = 0
        size, minutes = formats.counted(order.space.size, "combination"), formats.elapsed(order.seconds)
        self.say(f"searching {size} for {order.objective.words}, {minutes} at most")

    def standing(self, standing: Standing) -> None:
        """Where the search is now."""
        seconds_left = f"{formats.elapsed(max(0.0, standing.seconds_left))} left"
        new, self._told = standing.tried[self._told :], len(standing.tried)
        for number, tried in enumerate(new, self._told - len(new) + 1):
            self.say(f"{number}: {_outcome(tried)}: {tried.spec.id}; {standing.left:,} left, {seconds_left}")
        if standing.doing and not standing.doing.startswith("trial"):
            self.say(f"{standing.doing}; {seconds_left}")

    def say(self, line: str) -> None:
        """A line about what happens, or about why nothing seems to."""
        if sys.stderr is not None:
            print(one_line(f"llmperf: {line}"), file=sys.stderr, flush=True)

    @contextmanager
    def launch(self, spec_id: str, number: int, launches: int) -> Iterator[LaunchLines]:
        """Nothing is shown of one launch: several may run side by side, and each trial has its line."""
        yield LaunchLines(Numbered(spec_id, number, launches), say=lambda _line: None, write=None)


def _outcome(tried: Tried) -> str:
    trial = tried.trial
    kept = ", by an earlier search" if tried.was_kept else ""
    kept += "".join(f", spoilt: {line}" for line in trial.disturbances[:1])
    if not trial.is_measured:
        return f"failed ({trial.kind}: {trial.failure}){kept}"
    rate = formats.tokens_per_second(trial.tokens_per_second_per_gpu)
    return f"{rate} tokens/s/GPU, {formats.memory(trial.peak_reserved_bytes)}{kept}"
