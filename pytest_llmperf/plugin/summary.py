"""The table at the end of a run, and what stands around it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pytest

from pytest_llmperf.judge.run_effects import host_shift
from pytest_llmperf.judge.static_steps import upgrade_lines
from pytest_llmperf.plugin.benchmark import unwritten
from pytest_llmperf.report.summary_table import summary_lines, wide_gates
from pytest_llmperf.report.text import fold, leaving
from pytest_llmperf.report.time_spent import longest_lines
from pytest_llmperf.run.plan import cost_lines, plan_lines, planned_gpu_seconds, priced, skip_lines
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.run_end import idle_line, listed


def summarise(run: Run, reporter: pytest.TerminalReporter) -> None:
    """The table at the end; a dry run's plan instead."""
    lines = _folded([*run.told, *unwritten(reporter.config)], reporter)
    if run.settings.against_itself:
        lines.append(f"--perf-against {run.settings.against}: the same environment on both sides")
    if run.settings.dry_run and run.settings.update != "prune":
        planned, price = run.findings.planned, run.settings.price
        costs = cost_lines(planned_gpu_seconds(planned), price) if price else []
        lines = [*map(leaving, plan_lines(planned, run.settings.budget_gpu_hours)), *costs, *lines]
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
    whole_run = run.finished.whole_run if run.finished else None
    results, width = run.findings.results, reporter._tw.fullwidth if reporter.isatty else None
    spent = run.findings.spent
    table = summary_lines(
        priced(results, None if run.on_cpu else run.settings.price),
        width,
        reporter._tw.hasmarkup,
        sys.stdout.encoding,
        spent,
        verbose=reporter.verbosity > 0,
    )
    costs = cost_lines(spent.gpu_seconds, run.settings.price)
    most = reporter.config.getoption("durations", None)  # pytest's own, which tells of whole tests; 0: all
    longest = [] if most is None else longest_lines(results, most)
    upgrade = upgrade_lines(results) if run.settings.static else []
    common = whole_run.line if whole_run and (whole_run.change or whole_run.line) else host_shift(results)
    below = [*upgrade, *costs, *filter(None, [wide_gates(results)]), *longest]
    return [*_folded(filter(None, [common]), reporter), *table, *_folded(below, reporter)]


def _folded(lines: Iterable[str], reporter: pytest.TerminalReporter) -> list[str]:
    """For a terminal, whose own way to break a line is within a word; a file gets lines as long as they are."""
    width = reporter._tw.fullwidth if reporter.isatty else None
    return [part for line in lines for part in fold(leaving(line), width, indent="  ") or [""]]
