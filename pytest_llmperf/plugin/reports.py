"""What a test's report carries of its findings, and the reports of what fails a run and is no test's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llmperf.plugin import is_case
from pytest_llmperf.plugin.outcomes import cause
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.text import leaving, one_line
from pytest_llmperf.run.findings import ALL, SOME, STOPPED, Findings

if TYPE_CHECKING:
    from pytest_llmperf.run.run import Run
    from pytest_llmperf.run.run_end import Trouble

#: Of the item that finds.
FINDINGS = pytest.StashKey[Findings]()

# One line is a message; more are a traceback, whose last line tells.
_SHORT = 1

# They remember what failed in order to run it again, and a trouble of the run is no test.
_REMEMBERING = ("lfplugin", "stepwiseplugin")


def attach(
    run: Run, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, findings: Findings
) -> None:
    """Let ``report`` carry what was found in this phase of the test, as plain data that xdist sends on."""
    findings.cut |= call.excinfo is not None and not findings.stopped
    crash = getattr(report.longrepr, "reprcrash", None) if report.failed else None
    if crash is not None and len(findings.results) == 1:
        crash.message = cause(crash.message, findings.results[0].id)
    if report.failed and report.when != "teardown" and not findings.results:
        findings.results.append(_unjudged(run, item.nodeid, report.longreprtext))
    if is_case(item) and report.when == "call" and report.passed and not findings.named:
        report.llmperf_idle = True  # type: ignore[attr-defined]
    if findings.results:
        from pytest_llmperf.report.consumers.documents import properties
        from pytest_llmperf.report.consumers.exported_run import ExportedCase
        from pytest_llmperf.report.results_json import result_of

        # Of this report and those that follow JUnit's reporter takes the last one's.
        for result in findings.results:
            item.user_properties += properties(ExportedCase.read(result_of(result), result.machine))
        report.user_properties = list(item.user_properties)
    # What ended the run says it of no test. A fixture may judge too.
    report.llmperf = findings.take("" if run.unfinished else _said(findings, report))  # type: ignore[attr-defined]


def forget_properties(item: pytest.Item) -> None:
    """What an attempt before this one found."""
    from pytest_llmperf.report.consumers.documents import PREFIX

    item.user_properties[:] = [each for each in item.user_properties if not each[0].startswith(PREFIX)]


def _said(findings: Findings, report: pytest.TestReport) -> str:
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


def _unjudged(run: Run, nodeid: str, message: str) -> CaseResult:
    """A perf test that failed before anything was judged: it too must be seen by who reads only the results."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = lines[-1] if len(lines) > _SHORT else (lines or ["failed"])[0]
    return CaseResult(
        id=nodeid.rpartition("::")[2],
        digest="",
        nodeid=nodeid,
        machine=run.machine_kind,
        verdict="invalid",
        reason=reason,
    )


def last_attempt(
    before: dict[str, list[str]], report: pytest.TestReport, values: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What counts of what a report brought: a test that another plugin runs again counts once, as it ended last.

    Of an attempt ``before`` that only what it cost. The last one's results say what came before: whatever it found, it
    is not all that was found.
    """
    if str(report.outcome) == "rerun":
        verdicts = [f"{result['id']} was {result['verdict']}" for result in values["results"]]
        before.setdefault(report.nodeid, []).extend(verdicts)
        return {**values, "results": (), "planned": (), "skipped": (), "said": ""}
    if not before.get(report.nodeid):
        return values
    note = f"the test was run again: {', '.join(before[report.nodeid])} before"
    return {**values, "results": [{**result, "notes": (*result["notes"], note)} for result in values["results"]]}


def tell(config: pytest.Config, trouble: Trouble) -> None:
    """Have every reporter count it as an error of the run's end: an exit code under a green line explains nothing.

    Must run before any of them ends: in a ``pytest_sessionfinish`` that comes first, and in the controller alone.
    """
    report = pytest.TestReport(
        nodeid=f"llmperf::{trouble.name}",
        location=("llmperf", None, f"the run: {trouble.name}"),
        keywords={},
        outcome="failed",
        longrepr=leaving("\n".join(trouble.lines)),
        when="teardown",
    )
    report.llmperf_trouble = ""  # type: ignore[attr-defined]
    plugins = config.pluginmanager
    without = [plugin for name in _REMEMBERING if (plugin := plugins.get_plugin(name)) is not None]
    plugins.subset_hook_caller("pytest_runtest_logreport", without)(report=report)
    report.llmperf_trouble = "ERROR"  # type: ignore[attr-defined]
