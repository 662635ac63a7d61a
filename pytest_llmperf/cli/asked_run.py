"""The run that a command makes of its arguments, and what is seen of its launches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pytest_llmperf.report.progress_line import LaunchLines, Numbered
from pytest_llmperf.run.findings import UsageError
from pytest_llmperf.run.reading import read_settings
from pytest_llmperf.run.run import Run


def asked_run(arguments: argparse.Namespace, front: str, **fixed: Any) -> Run:
    """On hardware that is there; ``fixed`` are settings that the command's own options say."""
    with usage_errors(arguments):
        run = Run(read_settings(front, arguments, here=Path.cwd(), rootdir=Path.cwd(), **fixed), rootdir=Path.cwd())
        _ = run.machine_kind
    return run


@contextmanager
def usage_errors(arguments: argparse.Namespace) -> Iterator[None]:
    """Ends the command as argparse does, where what was asked for cannot be had, before anything is launched."""
    try:
        yield
    except UsageError as error:
        usage: Callable[[str], NoReturn] = arguments.usage
        usage(str(error))


class Terminal:
    """Standard error, since what is printed as the answer stays by itself: a live line, in a log two plain lines."""

    def say(self, line: str) -> None:
        """A line about what happens, or about why nothing seems to."""
        print(f"llmperf: {line}", file=sys.stderr, flush=True)

    @contextmanager
    def launch(self, spec_id: str, number: int, launches: int) -> Iterator[LaunchLines]:
        """Show one launch from its start to its end, however it ends."""
        write = self._write if sys.stderr.isatty() else None
        lines = LaunchLines(Numbered(spec_id, number, launches), say=self.say, write=write)
        try:
            yield lines
        finally:
            lines.clear()

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def ended_from_outside(self, _error: BaseException) -> str:
        """Nobody but Ctrl-C ends a command."""
        return ""
