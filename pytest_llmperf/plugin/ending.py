"""Around a run: the line before it, and after it the table, the JSON, unused baselines and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.judge.common import host_shift
from pytest_llmperf.judge.document import BaselineError
from pytest_llmperf.judge.store import BaselineStore
from pytest_llmperf.plugin.allocated import OVER_BUDGET, UNFINISHED
from pytest_llmperf.plugin.costs import cost_document, cost_lines, planned_gpu_seconds, priced
from pytest_llmperf.plugin.plan import plan_lines
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.plugin.unused import file_of, gaps, partly, unused_baselines
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
        session.config.workeroutput["llmperf"] = session.coverage.to_dict()
        return
    if session.job is not None:
        session.job.note_spent()
    if session.unfinished and pytest_session.exitstatus != OVER_BUDGET:
        pytest_session.exitstatus = UNFINISHED
    if not _concerned(session):
        return
    if session.settings.update == "prune":
        _prune(session, pytest_session)
    if session.settings.strict and not session.unfinished and _listed(session):
        _fail(pytest_session)
    path = session.settings.json
    if path is not None:
        try:
            write_json(path, _document(session, int(pytest_session.exitstatus)))
        except OSError as error:
            session.notes.append(f"--perf-json {path}: not written ({error})")
            _fail(pytest_session)


def summarise(session: PerfSession, reporter: pytest.TerminalReporter) -> None:
    """The table at the end; a dry run's plan instead."""
    if not _concerned(session):
        return
    lines = list(session.notes)
    if session.settings.against_itself:
        lines.append(f"--perf-against {session.settings.against}: the same environment on both sides")
    if session.settings.dry_run and session.settings.update != "prune":
        planned = session.findings.planned
        costs = cost_lines(planned_gpu_seconds(planned), session.settings.price) if session.settings.price else []
        lines = plan_lines(planned) + costs + lines
    elif session.findings.results:
        tty = bool(reporter.isatty)
        width = reporter._tw.fullwidth if tty else None
        table = summary_lines(_priced(session), width, reporter._tw.hasmarkup, sys.stdout.encoding)
        lines = [*filter(None, [host_shift(session.findings.results)]), *table, *_spent(session), *lines]
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


def _document(session: PerfSession, exit_code: int) -> dict[str, Any]:
    values = document(_machine(session), _priced(session)) | {"exit_code": exit_code}
    values |= cost_document(session.findings.gpu_seconds, session.settings.price)
    return values | ({"unfinished": session.unfinished} if session.unfinished else {})


def _priced(session: PerfSession) -> list[CaseResult]:
    """A CPU has no GPU-hours, and so no price."""
    return priced(session.findings.results, None if session.on_cpu else session.settings.price)


def _spent(session: PerfSession) -> list[str]:
    return cost_lines(session.findings.gpu_seconds, session.settings.price)


def _concerned(session: PerfSession) -> bool:
    findings = session.findings
    asked = session.settings.json or session.settings.update == "prune"
    return bool(findings.results or findings.planned or findings.digests or asked)


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
    entries = BaselineStore(session.settings.baselines).entries(session.machine_kind)
    coverage, config = session.coverage, session.config
    coverage.parts |= set(partly(config))
    coverage.gaps |= set(gaps(config, session.settings.baselines, [file_of(entry.recorded_by) for entry in entries]))
    return unused_baselines(entries, set(session.findings.digests), coverage, config.rootpath)


def _listed(session: PerfSession) -> list[str]:
    try:
        unused = _unused(session)
    except BaselineError as error:
        return [str(error)]
    what = "remove it with --update-baselines=prune"
    if session.settings.update == "prune":
        if not session.coverage.doubts():
            return []  # they were removed, or named as what would be
        what = "delete the file"
    why = f"no case of this run has its settings; if they are gone, {what}"
    return [f"unused baseline: {path} ({why})" for path in unused]


def _prune(session: PerfSession, pytest_session: pytest.Session) -> None:
    try:
        unused = _unused(session)
        doubts = session.coverage.doubts()
        if doubts:
            session.notes.append(f"--update-baselines=prune: nothing was removed, {doubts}")
            _fail(pytest_session)
        elif session.settings.dry_run:
            session.notes += [f"--update-baselines=prune would remove: {path}" for path in unused]
        else:
            session.notes += [] if unused else ["--update-baselines=prune: nothing to remove, every baseline is in use"]
            for path in unused:
                path.unlink()
                session.notes.append(f"removed baseline: {path}")
    except (BaselineError, OSError) as error:
        session.notes.append(f"--update-baselines=prune: {error}")
        _fail(pytest_session)
