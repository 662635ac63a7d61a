"""Around a run: the line before it, and after it the table, the JSON, unused baselines and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.judge.baseline import BaselineError
from pytest_llmperf.judge.common import host_shift
from pytest_llmperf.judge.store import BaselineStore
from pytest_llmperf.plugin.plan import plan_lines
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.plugin.unused import unused_baselines
from pytest_llmperf.report.results_json import document, write_json
from pytest_llmperf.report.terminal import summary_lines
from pytest_llmperf.result import CaseResult


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
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["llmperf"] = {
            "perf_nodes": sorted(session.perf_nodes),
            "files": [str(path) for path in session.collected_files],
            "deselected": session.deselected,
        }
        return
    if not _concerned(session):
        return
    path = session.settings.json
    if path is not None:
        try:
            write_json(path, document(_machine(session), session.findings.results))
        except OSError as error:
            session.notes.append(f"--perf-json {path}: not written ({error})")
            _fail(pytest_session)
    if session.settings.update == "prune" and not session.settings.dry_run:
        _prune(session, pytest_session)
    if session.settings.strict and _listed(session):
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
        table = summary_lines(session.findings.results, width, reporter._tw.hasmarkup, sys.stdout.encoding)
        lines = [*filter(None, [host_shift(session.findings.results)]), *table, *lines]
    lines += _listed(session)
    if not lines:
        return
    reporter.section("llmperf", "=")
    for line in lines:
        reporter.write_line(line)


def unjudged(session: PerfSession, nodeid: str, message: str) -> CaseResult:
    """A perf test that failed before anything was judged: it too must be seen by who reads only the results."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = lines[-1] if len(lines) > _SHORT else (lines or ["failed"])[0]
    return CaseResult(
        id=nodeid.rpartition("::")[2],
        digest="",
        nodeid=nodeid,
        machine=session.machine_kind,
        verdict="invalid",
        reason=reason,
    )


# One line is a message; more are a traceback, whose last line tells.
_SHORT = 1


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


def _unused(session: PerfSession) -> list[Path]:
    """Baselines that no case of this run has; none where not every case was asked.

    Raises:
        BaselineError: one of them cannot be read.
    """
    if _partial(session):
        return []
    entries = BaselineStore(session.settings.baselines).entries(session.machine_kind)
    files = {_relative(path, session.config.rootpath) for path in session.collected_files}
    return unused_baselines(entries, set(session.findings.digests), files, session.config.rootpath)


def _partial(session: PerfSession) -> str:
    """Why this run does not know every baseline in use; empty where it does."""
    if session.deselected or any("::" in argument for argument in session.config.args):
        return "only some tests were selected"
    if not session.findings.digests or session.perf_nodes - session.named:
        return "not every perf test said what it runs"  # skipped, failed before, or not reached
    return ""


def _listed(session: PerfSession) -> list[str]:
    try:
        unused = _unused(session)
    except BaselineError as error:
        return [str(error)]
    why = "no case of this run has its settings; if they are gone, remove it with --update-baselines=prune"
    return [f"unused baseline: {path} ({why})" for path in unused]


def _prune(session: PerfSession, pytest_session: pytest.Session) -> None:
    why = _partial(session)
    if why:
        session.notes.append(f"--update-baselines=prune: nothing was removed, {why}; run the whole suite")
        _fail(pytest_session)
        return
    try:
        for path in _unused(session):
            path.unlink()
            session.notes.append(f"removed baseline: {path}")
    except (BaselineError, OSError) as error:
        session.notes.append(f"--update-baselines=prune: {error}")
        _fail(pytest_session)


def _relative(path: Path, root: Path) -> str:
    return os.path.relpath(path, root)
