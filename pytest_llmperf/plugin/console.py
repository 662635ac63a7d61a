"""What a person sees: while a launch runs a live line, or two plain ones in a log; at the end of the run its table."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from pytest_llmperf.report.text import LaunchLines, Numbered, fold, leaving
from pytest_llmperf.run.run import Run


class Console:
    """Writes past pytest's capture to its reporter's place; a worker of pytest-xdist only tells why it waits."""

    def __init__(self, config: pytest.Config) -> None:
        self._reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._terminal: Any = config.get_terminal_writer() if self._reporter is not None else None
        self._worker: str = getattr(config, "workerinput", {}).get("workerid", "")
        self._quiet = self._reporter is None or bool(self._worker) or config.get_verbosity() < 0
        self.is_live = not self._quiet and bool(self._reporter.isatty)
        self._left_at: int | None = None
        """Column of the line above the live one, at which pytest's own output goes on."""

    def say(self, line: str) -> None:
        """One line of its own; also under ``-q``, since it tells why nothing seems to happen."""
        with self._uncaptured():
            if self._worker:
                if sys.__stderr__ is not None:
                    # In one piece: other workers write there too.
                    sys.__stderr__.write(f"llmperf [{self._worker}]: {leaving(line)}\n")
                    sys.__stderr__.flush()
            elif self._reporter is not None:
                self._return()
                self._reporter.ensure_newline()
                self._reporter.write_line(f"llmperf: {leaving(line)}")
                # A log would show it with the next test; what is left in the buffer may end up as captured output.
                self._reporter.flush()

    @contextmanager
    def launch(self, spec_id: str, number: int, launches: int) -> Iterator[LaunchLines]:
        """Show one launch from its start to its end, however it ends."""
        say = (lambda _line: None) if self._quiet else self.say
        write = self.write if self.is_live else None
        lines = LaunchLines(Numbered(spec_id, number, launches), say=say, write=write)
        try:
            yield lines
        finally:
            lines.clear()
            with self._uncaptured():
                self._return()

    def ended_from_outside(self, error: BaseException) -> str:
        """Why a test was failed while it waited, as by pytest-timeout: its traceback is a page of how we wait."""
        of_pytest = isinstance(error, pytest.fail.Exception) and getattr(error, "pytrace", False)
        return str(error).rstrip(".") if of_pytest else ""

    def write(self, text: str) -> None:
        """Raw text to the terminal, for the live line, which is below the line that pytest has begun."""
        with self._uncaptured():
            if self._left_at is None and self._reporter.currentfspath is not None:
                self._left_at = self._terminal.width_of_current_line
                text = f"\n{text}"
            self._write_raw(text)

    def _return(self) -> None:
        # To where pytest has left its own line, so that its next letter stands there.
        if self._left_at is not None:
            column = self._left_at % self._terminal.fullwidth
            self._write_raw("\r\x1b[K\x1b[A" + (f"\x1b[{column}C" if column else ""))
            self._left_at = None

    def _write_raw(self, text: str) -> None:
        self._terminal.flush()  # pytest's writer counts columns: past it
        sys.stdout.write(text)
        sys.stdout.flush()

    def _uncaptured(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._capture is None else self._capture.global_and_fixture_disabled()


def summarise(run: Run, reporter: pytest.TerminalReporter) -> None:
    """The table at the end; a dry run's plan instead."""
    from pytest_llmperf.plugin.reports import unwritten_benchmarks
    from pytest_llmperf.run.leftovers import listed
    from pytest_llmperf.run.run_end import idle_line
    from pytest_llmperf.run.whole_run import plan_lines, skip_lines

    lines = _folded([*run.told, *unwritten_benchmarks(reporter.config)], reporter)
    if run.settings.against_itself:
        lines.append(f"--perf-against {run.settings.against}: the same environment on both sides")
    if run.settings.dry_run:
        lines = [*map(leaving, plan_lines(run.findings.planned)), *lines]
    elif run.findings.results or run.findings.spent.launches:
        lines = _table(run, reporter) + lines
    idle = [idle_line(run.idle)] if run.idle else []
    lines += _folded([*skip_lines(run.findings.skipped), *listed(run), *idle], reporter)
    if not lines:
        return
    reporter.section("llmperf", "=")
    for line in lines:
        reporter.write_line(line)


def _table(run: Run, reporter: pytest.TerminalReporter) -> list[str]:
    from pytest_llmperf.report.summary_table import summary_lines, wide_gates

    results, spent, how = run.findings.results, run.findings.spent, (reporter._tw.hasmarkup, sys.stdout.encoding)
    table = summary_lines(results, _width(reporter), *how, spent, verbose=reporter.verbosity > 0)
    cost = f"{spent.gpu_seconds / 3600:.3g} GPU-hours in launches" if spent.gpu_seconds > 0 else ""
    common = run.finished.whole_run.line if run.finished else ""
    below = filter(None, [cost, wide_gates(results)])
    return [*_folded(filter(None, [common]), reporter), *table, *_folded(below, reporter)]


def _folded(lines: Iterable[str], reporter: pytest.TerminalReporter) -> list[str]:
    """For a terminal, whose own way to break a line is within a word; a file gets lines as long as they are."""
    return [part for line in lines for part in fold(leaving(line), _width(reporter), indent="  ") or [""]]


def _width(reporter: pytest.TerminalReporter) -> int | None:
    return reporter._tw.fullwidth if reporter.isatty else None
