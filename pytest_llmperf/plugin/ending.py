"""Around a run: the line before it, and after it the table, the JSON, unused baselines and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.judge.baseline import BaselineError
from pytest_llmperf.judge.store import BaselineStore
from pytest_llmperf.plugin.plan import plan_lines
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.plugin.unused import unused_baselines
from pytest_llmperf.report.results_json import document, write_json
from pytest_llmperf.report.terminal import summary_lines


def header(session: PerfSession, items: list[pytest.Item]) -> list[str]:
    """One line about where the cases run; nothing where no perf test was collected."""
    cases = sum("perf" in getattr(item, "fixturenames", ()) for item in items)
    if not cases or session.config.get_verbosity() < 0:
        return []
    where = f"{session.num_gpus} GPU(s)" if not session.on_cpu else "the CPU (gloo)"
    baselines = os.path.relpath(session.settings.baselines, session.config.invocation_params.dir)
    return [f"llmperf: {cases} case(s) on {session.machine_kind}, {where}, baselines {baselines}"]


def finish(session: PerfSession, pytest_session: pytest.Session) -> None:
    """Write the JSON and let a strict run fail for what no single case can see; runs in the controller alone."""
    if hasattr(session.config, "workerinput") or not _concerned(session):
        return
    path = session.settings.json
    if path is not None:
        try:
            write_json(path, document(_machine(session), session.findings.results))
        except OSError as error:
            session.notes.append(f"--perf-json {path}: not written ({error})")
            _fail(pytest_session)
    if session.settings.strict and _unused(session):
        _fail(pytest_session)


def summarise(session: PerfSession, reporter: pytest.TerminalReporter) -> None:
    """The table at the end; a dry run's plan instead."""
    if not _concerned(session):
        return
    lines = list(session.notes)
    if session.settings.dry_run:
        lines = plan_lines(session.findings.planned) + lines
    elif session.findings.results:
        tty = bool(reporter.isatty)
        width = reporter._tw.fullwidth if tty else None
        lines = summary_lines(session.findings.results, width, reporter._tw.hasmarkup, sys.stdout.encoding) + lines
    lines += _unused(session)
    if not lines:
        return
    reporter.section("llmperf", "=")
    for line in lines:
        reporter.write_line(line)


def _concerned(session: PerfSession) -> bool:
    findings = session.findings
    return bool(findings.results or findings.planned or findings.digests or session.settings.json)


def _fail(pytest_session: pytest.Session) -> None:
    if pytest_session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        pytest_session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _machine(session: PerfSession) -> Mapping[str, Any]:
    gpus = session.machine.gpus[: session.num_gpus]
    return {
        "kind": session.machine_kind,
        "cores": session.machine.cores,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes, "uuid": gpu.uuid} for gpu in gpus],
    }


def _unused(session: PerfSession) -> list[str]:
    if not session.findings.digests or session.deselected:
        return []
    try:
        entries = BaselineStore(session.settings.baselines).entries(session.machine_kind)
    except BaselineError as error:
        return [str(error)]
    files = {_relative(path, session.config.rootpath) for path in session.collected_files}
    unused = unused_baselines(entries, set(session.findings.digests), files, session.config.rootpath)
    why = "no case of this run has its settings; delete it if they are gone"
    return [f"unused baseline: {path} ({why})" for path in unused]


def _relative(path: Path, root: Path) -> str:
    return os.path.relpath(path, root)
