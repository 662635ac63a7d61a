"""The line that moves while a launch runs, and the two lines that a log gets instead."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import NamedTuple

from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import RATE, measured
from pytest_llmperf.report.text import glyphs_of, one_line, shorten_middle
from pytest_llmperf.support import formats

_UPDATES_PER_SECOND = 5
_GAP = "  "
# Below this an id says less than the figures it would push out.
_SHORTEST_ID = 12
# In a log, what takes longer says so, and again each time.
_STILL_SECONDS = 30.0
# A first step that takes longer seems to hang: what it does is said.
_LONG_FIRST_STEP_SECONDS = 5.0


class Numbered(NamedTuple):
    """Which launch of its case a line is about."""

    spec_id: str
    number: int
    """From 1."""
    launches: int
    """As many as its case takes, as far as that is known."""

    def __str__(self) -> str:
        return f"launch {self.number}/{self.launches}"


def live_line(  # noqa: PLR0913 - what it shows, and where
    launch: Numbered, progress: Progress, seconds: float, width: int, encoding: str | None = "utf-8", *, run: str = ""
) -> str:
    """One line of at most ``width - 1`` (a full one would wrap): the id gives way first, then the lesser figures.

    ``run``: how far the run is, the least of them.
    """
    room = max(width - 1, 0)
    name, tail, phase = one_line(launch.spec_id, encoding), "", _phase(progress)
    rate = f"{formats.compact(progress.tokens_per_second)} tokens/s" if progress.tokens_per_second > 0 else ""
    memory = formats.memory(progress.reserved_bytes) if progress.reserved_bytes > 0 else ""
    elapsed, number = formats.elapsed(seconds), str(launch)
    for parts in (  # all figures, then fewer and fewer
        (number, phase, rate, memory, elapsed, run),
        (phase, rate, memory, elapsed, run),
        (number, phase, rate, memory, elapsed),
        (phase, rate, memory, elapsed),
        (phase, rate, elapsed),
        (phase, elapsed),
        (phase,),
    ):
        tail = _GAP.join(part for part in parts if part)
        if min(len(name), _SHORTEST_ID) + len(_GAP) + len(tail) <= room:
            break
    name = shorten_middle(name, room - len(_GAP) - len(tail), glyphs_of(encoding).ellipsis)
    return (f"{name}{_GAP}{tail}" if name else tail)[:room].rstrip()


def _phase(progress: Progress) -> str:
    if progress.phase != "training":
        return one_line(progress.phase)
    if progress.step == 0 and progress.phase_seconds > _LONG_FIRST_STEP_SECONDS:
        why = ": it compiles kernels" if progress.compiles else ""
        return f"first step for {formats.elapsed(progress.phase_seconds)}{why}"
    return f"step {progress.step}/{progress.steps}"


class LaunchLines:
    """The lines of one launch: one that moves where ``write`` is given, else two that are said."""

    def __init__(
        self,
        launch: Numbered,
        *,
        say: Callable[[str], None],
        write: Callable[[str], None] | None,
        run: Callable[[], str] = lambda: "",
    ) -> None:
        """``run`` tells how far the run is that the launch is of."""
        self._launch, self._say, self._write, self._run = launch, say, write, run
        self._name = f"{one_line(launch.spec_id)}: {launch}"
        self._start = self._said_at = time.monotonic()
        self._drawn_at: float | None = None
        self._is_told = False

    def update(self, progress: Progress) -> None:
        """Show a launch that runs: one that waits for its nodes, or for which no time is left, has not started."""
        now = time.monotonic()
        if self._write is not None:
            if self._drawn_at is None or now - self._drawn_at >= 1 / _UPDATES_PER_SECOND:
                # Asked now and not at the start: the window may have been resized.
                width = shutil.get_terminal_size().columns
                line = live_line(self._launch, progress, now - self._start, width, run=self._run())
                self._write(f"\r{line}\x1b[K")
                self._drawn_at = now
        elif not self._is_told:
            self._is_told = True
            self._say(f"{self._name} started")
        elif now - self._said_at >= _STILL_SECONDS:
            self._said_at = now
            self._say(f"{self._name}: {_phase(progress)}, {formats.elapsed(now - self._start)}")

    def finished(self, launch: Launch) -> None:
        """It has left its record."""
        row = measured([launch])[RATE]
        figures = (
            f"{formats.tokens_per_second(row.read([launch]))} {row.label}",
            formats.memory(launch.peak_reserved_bytes),
            f"{len(launch.step_seconds)} steps",
            formats.seconds(launch.wall_seconds),
        )
        if self._write is None:
            self._say(f"{self._name} finished: {', '.join(figures)}")
        self.clear()

    def clear(self) -> None:
        """Show nothing more of it: the cursor is left at the start of an empty line."""
        if self._write is not None and self._drawn_at is not None:
            self._write("\r\x1b[K")
            self._drawn_at = None
