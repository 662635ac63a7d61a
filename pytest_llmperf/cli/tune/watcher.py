"""Watcher: what is seen of a search while it runs: a live table on a terminal, a line a trial in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_llmperf.engine.tuning.order import TuningOrder
from pytest_llmperf.engine.tuning.tuner import Standing
from pytest_llmperf.engine.tuning.tuning import Tried
from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import formats

# Of a live table, that leaves room for what was typed before.
_ROWS = 8


class Watcher:
    """On standard error: what is printed as the answer stays by itself."""

    def __init__(self, order: TuningOrder) -> None:
        self._order = order
        self._standing: Standing | None = None
        self._now, self._told = "", 0
        self._live: Any = None

    def __enter__(self) -> Watcher:  # noqa: PYI034 - typing has no Self before Python 3.11
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console  # noqa: PLC0415 - a log needs none
            from rich.live import Live  # noqa: PLC0415

            self._live = Live(
                console=Console(stderr=True), get_renderable=self._table, refresh_per_second=4, transient=True
            )
            self._live.start()
        else:
            size = formats.counted(self._order.space.size, "combination")
            minutes = formats.elapsed(self._order.seconds)
            self.say(f"searching {size} for {self._order.objective.words}, {minutes} at most")
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def standing(self, standing: Standing) -> None:
        """Where the search is now."""
        self._standing, self._now = standing, standing.doing
        if self._live is not None:
            return
        new, self._told = standing.tried[self._told :], len(standing.tried)
        for number, tried in enumerate(new, self._told - len(new) + 1):
            self.say(f"{number}: {_outcome(tried)}: {tried.spec.id}; {self._rest(standing)}")
        if standing.doing and not standing.doing.startswith("trial"):
            self.say(f"{standing.doing}; {formats.elapsed(max(0.0, standing.seconds_left))} left")

    def say(self, line: str) -> None:
        """A line about what happens, or about why nothing seems to."""
        if self._live is not None:
            self._live.console.print(one_line(f"llmperf: {line}"), markup=False, highlight=False)
        elif sys.stderr is not None:
            print(one_line(f"llmperf: {line}"), file=sys.stderr, flush=True)

    @contextmanager
    def launch(self, spec_id: str, _number: int, _launches: int) -> Iterator[_Launch]:
        """One launch, from its start to its end."""
        yield _Launch(self, spec_id)

    def ended_from_outside(self, _error: BaseException) -> str:
        """Nobody but Ctrl-C ends a command."""
        return ""

    def now(self, text: str) -> None:
        """What the launch that runs is at."""
        self._now = text

    def _rest(self, standing: Standing) -> str:
        return f"{standing.left:,} left, {formats.elapsed(max(0.0, standing.seconds_left))} left"

    def _table(self) -> Any:
        from rich.console import Group  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, pad_edge=False)
        for heading in ("tokens/s/GPU", "memory", "configuration"):
            table.add_column(heading, justify="left" if heading == "configuration" else "right")
        standing, below = self._standing, ["looking at the space"]
        if standing is not None:
            log_of = self._order.objective.log_of
            measured = [(log_of(one.trial), one) for one in standing.tried if one.trial.ranks]
            ranked = sorted(((log, one) for log, one in measured if log is not None), key=lambda both: both[0])
            for _, one in ranked[:_ROWS]:
                rate = formats.tokens_per_second(one.trial.tokens_per_second_per_gpu)
                table.add_row(rate, formats.memory(one.trial.peak_reserved_bytes), Text(one.spec.id))
            failed = sum(not one.trial.is_measured for one in standing.tried)
            counts = f"{len(standing.tried)} tried, {failed} of them in vain; {self._rest(standing)}"
            below = [counts, one_line(self._now)]
        return Group(table, *(Text(line, no_wrap=True, overflow="ellipsis") for line in below))


class _Launch:
    """What a launch tells of itself."""

    def __init__(self, watcher: Watcher, spec_id: str) -> None:
        self._watcher, self._name = watcher, spec_id

    def update(self, progress: Progress) -> None:
        """It has come so far."""
        at = f"step {progress.step}/{progress.steps}" if progress.phase == "training" else progress.phase
        self._watcher.now(f"{self._name}: {at}")

    def finished(self, _launch: Launch) -> None:
        """It has left its record."""

    def clear(self) -> None:
        """Nothing more is shown of it."""
        self._watcher.now("")


def _outcome(tried: Tried) -> str:
    trial = tried.trial
    kept = ", by an earlier search" if tried.was_kept else ""
    kept += "".join(f", spoilt: {line}" for line in trial.disturbances[:1])
    if not trial.is_measured:
        return f"failed ({trial.kind}: {trial.failure}){kept}"
    rate = formats.tokens_per_second(trial.tokens_per_second_per_gpu)
    return f"{rate} tokens/s/GPU, {formats.memory(trial.peak_reserved_bytes)}{kept}"
