"""What a command shows while it launches: a live line on a terminal, two plain lines in a log."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.report.progress_line import LiveLine, finished_line, live_line, started_line


class Terminal:
    """Standard error: what is printed as the answer stays by itself."""

    def say(self, line: str) -> None:
        print(f"llmperf: {line}", file=sys.stderr, flush=True)

    @contextmanager
    def launch(self, spec_id: str, number: int, launches: int) -> Iterator[TerminalLaunch]:
        """Show one launch from its start to its end, however it ends."""
        shown = TerminalLaunch(self, spec_id, number, launches)
        try:
            yield shown
        finally:
            shown.clear()

    def ended_from_outside(self, _error: BaseException) -> str:
        """Nobody but Ctrl-C ends a command."""
        return ""


class TerminalLaunch:
    """One launch as it is shown."""

    def __init__(self, terminal: Terminal, spec_id: str, number: int, launches: int) -> None:
        self._terminal, self._what = terminal, (spec_id, number, launches)
        self._start, self._is_told = time.monotonic(), False
        self._line = LiveLine(write=_write, width=_width) if sys.stderr.isatty() else None

    def update(self, progress: Progress) -> None:
        if self._line is not None:
            self._line.update(live_line(*self._what, progress, time.monotonic() - self._start, _width()))
        elif not self._is_told:
            self._is_told = True
            self._terminal.say(started_line(*self._what))

    def finished(self, launch: Launch) -> None:
        self.clear()
        if self._line is None:
            self._terminal.say(finished_line(*self._what, launch))

    def clear(self) -> None:
        if self._line is not None:
            self._line.clear()


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _width() -> int:
    return shutil.get_terminal_size().columns
