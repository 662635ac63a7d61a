"""What a test's report says of its findings: how much of what it runs it has told, and what was withheld from it."""

from __future__ import annotations

import pytest

from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.text import one_line
from pytest_llmperf.run.coverage import ALL, SOME, STOPPED
from pytest_llmperf.run.findings import Findings

#: Of the item that finds.
FINDINGS = pytest.StashKey[Findings]()

# One line is a message; more are a traceback, whose last line tells.
_SHORT = 1


def ended(findings: Findings, call: pytest.CallInfo[None]) -> None:
    """Take note of how a phase of the test ended."""
    findings.cut |= call.excinfo is not None and not findings.stopped


def said(findings: Findings, report: pytest.TestReport) -> str:
    """How much of what it runs the test has said; empty where it is too early to tell."""
    if report.when != "call" and report.passed:
        return ""
    if findings.cut or report.failed or not findings.named:
        return SOME
    return STOPPED if findings.stopped else ALL


def withhold(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, findings: Findings) -> None:
    """Show a test for which nothing was launched as skipped, also where it failed for want of figures."""
    if not findings.withheld or findings.results or report.skipped:
        return
    if report.when == "teardown" or (report.when == "setup" and report.passed):
        return
    reason = findings.withheld
    if call.excinfo is not None:
        reason += f" (it ended early: {call.excinfo.exconly(tryshort=True).splitlines()[0]})"
    path, line = item.reportinfo()[:2]
    report.outcome, report.longrepr = "skipped", (str(path), (line or 0) + 1, f"Skipped: {reason}")


def outcome(report: pytest.TestReport) -> dict[str, str]:
    """How this phase of a test ended, as ``--perf-json`` has it; empty where a phase only passed around the test."""
    xfail = getattr(report, "wasxfail", None)
    if report.passed and xfail is None and report.when != "call":
        return {}
    word: str = report.outcome if report.when == "call" or not report.failed else "error"
    if xfail is not None:
        word = "xfailed" if report.skipped else "xpassed"
    reason = str(xfail or "") or (str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "")
    # xdist puts a line of its own before the text.
    whole = report.longrepr if isinstance(report.longrepr, str) else report.longreprtext
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or whole
    told = crash if report.failed else reason
    line = next(filter(None, map(one_line, told.splitlines())), "")
    found = {"nodeid": report.nodeid, "outcome": word, "phase": str(report.when), "reason": line}
    return {name: value for name, value in found.items() if value}


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
