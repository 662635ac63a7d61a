"""The table at the end of a run, and what stands around it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pytest

from pytest_llmperf.engine.dry_run import plan_lines, skip_lines
from pytest_llmperf.plugin.benchmark import unwritten
from pytest_llmperf.plugin.run_end.run_document import priced_results
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.report.text import fold, leaving


def summarise(session: PerfSession, reporter: pytest.TerminalReporter) -> None:
    """The table at the end; a dry run's plan instead."""
    if not is_concerned(session):
        return
    from pytest_llmperf.plugin.run_end.troubles import idle_line
    from pytest_llmperf.plugin.run_end.unused_baselines import listed

    lines = _folded([*session.told, *unwritten(session.config)], reporter)
    if session.settings.against_itself:
        lines.append(f"--perf-against {session.settings.against}: the same environment on both sides")
    if session.settings.dry_run and session.settings.update != "prune":
        from pytest_llmperf.run.gpu_hours import cost_lines, planned_gpu_seconds

        planned, price = session.findings.planned, session.settings.price
        costs = cost_lines(planned_gpu_seconds(planned), price) if price else []
        lines = [*map(leaving, plan_lines(planned, session.settings.budget_gpu_hours)), *costs, *lines]
    elif session.findings.results or session.findings.spent.launches:
        lines = _table(session, reporter) + lines
    idle = [idle_line(session.idle)] if session.idle else []
    lines += _folded([*skip_lines(session.findings.skipped), *listed(session), *idle], reporter)
    if not lines:
        return
    reporter.section("llmperf", "=")
    for line in lines:
        reporter.write_line(line)


def _table(session: PerfSession, reporter: pytest.TerminalReporter) -> list[str]:
    from pytest_llmperf.judge.run_effects import host_shift
    from pytest_llmperf.judge.static_step_checks import upgrade_lines
    from pytest_llmperf.report.summary_table import summary_lines, wide_gates
    from pytest_llmperf.report.time_spent import longest_lines
    from pytest_llmperf.run.gpu_hours import cost_lines

    whole_run = session.whole_run
    results, width = session.findings.results, reporter._tw.fullwidth if reporter.isatty else None
    spent = session.findings.spent
    table = summary_lines(priced_results(session), width, reporter._tw.hasmarkup, sys.stdout.encoding, spent)
    costs = cost_lines(spent.gpu_seconds, session.settings.price)
    most = reporter.config.getoption("durations", None)  # pytest's own, which tells of whole tests; 0: all
    longest = [] if most is None else longest_lines(results, most)
    upgrade = upgrade_lines(results) if session.settings.static else []
    common = whole_run.line if whole_run and (whole_run.change or whole_run.line) else host_shift(results)
    below = [*upgrade, *costs, *filter(None, [wide_gates(results)]), *longest]
    return [*_folded(filter(None, [common]), reporter), *table, *_folded(below, reporter)]


def _folded(lines: Iterable[str], reporter: pytest.TerminalReporter) -> list[str]:
    """For a terminal, whose own way to break a line is within a word; a file gets lines as long as they are."""
    width = reporter._tw.fullwidth if reporter.isatty else None
    return [part for line in lines for part in fold(leaving(line), width, indent="  ") or [""]]


def is_concerned(session: PerfSession) -> bool:
    findings = session.findings
    settings = session.settings
    asked = settings.json or settings.report or settings.markdown or settings.update == "prune"
    return bool(findings.results or findings.planned or findings.digests or session.idle or asked)
