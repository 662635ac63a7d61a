"""What a command shows while it launches: a live line on a terminal, two plain lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_llmperf.report.progress_line import LaunchLines, Numbered


class Terminal:
    """Standard error: what is printed as the answer stays by itself."""

    def say(self, line: str) -> None:
        """A line about what happens, or about why nothing seems to."""
        print(f"llmperf: {line}", file=sys.stderr, flush=True)

    @contextmanager
    def launch(self, spec_id: str, number: int, launches: int) -> Iterator[LaunchLines]:
        """Show one launch from its start to its end, however it ends."""
        lines = LaunchLines(
            Numbered(spec_id, number, launches), say=self.say, write=_write if sys.stderr.isatty() else None
        )
        try:
            yield lines
        finally:
            lines.clear()

    def ended_from_outside(self, _error: BaseException) -> str:
        """Nobody but Ctrl-C ends a command."""
        return ""


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
