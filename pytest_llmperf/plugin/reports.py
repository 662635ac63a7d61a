"""How a test ends: its outcome and report, the reports of what fails a run and is no test's, and pytest-benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import TerminalRepr

from pytest_llmperf.plugin import is_case
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.text import leaving, one_line
from pytest_llmperf.run.findings import ALL, SOME, STOPPED, Findings
from pytest_llmperf.settings.train_spec import SpecError
from pytest_llmperf.support.redaction import without_secrets

if TYPE_CHECKING:
    from pytest_llmperf.run.run import Run
    from pytest_llmperf.run.run_end import Trouble


FINDINGS = pytest.StashKey[Findings]()

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
    if report.failed and report.when != "teardown" and not findings.results and not findings.told:
        # Before anything was judged: it too must be seen by who reads only the results.
        case = item.nodeid.rpartition("::")[2]
        about: dict[str, Any] = {"id": case, "digest": "", "nodeid": item.nodeid, "machine": run.machine_kind}
        findings.results.append(CaseResult(**about, verdict="invalid", reason=_what_failed(report) or "failed"))
    if is_case(item) and report.when == "call" and report.passed and not findings.named:
        report.llmperf_idle = True  # type: ignore[attr-defined]
    if findings.results:
        from pytest_llmperf.report.exports import ExportedCase, properties
        from pytest_llmperf.report.results_json import result_of, shown

        # Of this report and those that follow JUnit's reporter takes the last one's.
        for result in findings.results:
            told = shown(result_of(replace(result, launches=(), launches_before=())))
            item.user_properties += properties(ExportedCase.of(told, result.machine))
        report.user_properties = list(item.user_properties)
    # What ended the run says it of no test. A fixture may judge too.
    report.llmperf = findings.take("" if run.unfinished else _said(findings, report))  # type: ignore[attr-defined]


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


def redact(report: pytest.TestReport) -> None:
    """Take secrets out of pytest's own words about a test: its traceback, and the output that was captured."""
    report.sections = [(title, without_secrets(text)) for title, text in report.sections]
    report.longrepr = _redacted(report.longrepr)


def _redacted(value: Any) -> Any:
    """Texts anew; what has them within keeps its type, which reporters and xdist know."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_redacted, value))
    if isinstance(value, TerminalRepr):
        for name, each in vars(value).items():
            setattr(value, name, _redacted(each))
    return value


def outcome(report: pytest.TestReport | pytest.CollectReport) -> dict[str, str]:
    """How this phase of a test ended, as ``--perf-json`` has it; empty where a phase only passed around the test."""
    xfail, phase = getattr(report, "wasxfail", None), str(getattr(report, "when", "collect"))
    if report.passed and xfail is None and phase != "call":
        return {}
    word: str = report.outcome if phase == "call" or not report.failed else "error"
    if xfail is not None:
        word = "xfailed" if report.skipped else "xpassed"
    reason = str(xfail or "") or (str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "")
    line = _what_failed(report) if report.failed else next(filter(None, map(one_line, reason.splitlines())), "")
    # A worker of xdist that is gone tells no phase.
    found = {"nodeid": report.nodeid, "outcome": word, "phase": "" if phase == "???" else phase, "reason": line}
    return {name: value for name, value in found.items() if value}


def _what_failed(report: pytest.TestReport | pytest.CollectReport) -> str:
    """In a line: the exception, the last of pytest's own lines of an error, or the first of what was said instead."""
    # xdist puts a line of its own before the text.
    whole = report.longrepr if isinstance(report.longrepr, str) else report.longreprtext
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    marked = [] if crash else [line[1:] for line in whole.splitlines() if line.startswith("E ")]
    return next(filter(None, map(one_line, [*marked[-1:], *(crash or whole).splitlines()])), "")


def last_attempt(
    before: dict[str, list[str]], report: pytest.TestReport, values: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Of a test that is run again its last attempt counts, and says what came ``before``; of others their cost."""
    if str(report.outcome) == "rerun":
        verdicts = [f"{result['id']} was {result['verdict']}" for result in values["results"]]
        before.setdefault(report.nodeid, []).extend(verdicts)
        return {**values, "results": (), "planned": (), "skipped": (), "said": ""}
    if not before.get(report.nodeid):
        return values
    note = f"the test was run again: {', '.join(before[report.nodeid])} before"
    return {**values, "results": [{**result, "notes": (*result["notes"], note)} for result in values["results"]]}


def tell(config: pytest.Config, trouble: Trouble) -> None:
    """Have every reporter count it as an error of the run's end, before any of them ends; in the controller alone."""
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


class DidNotTrain(pytest.fail.Exception):  # type: ignore[misc, name-defined]  # pytest hides its class
    """A launch ended without a record, which ``xfail(raises=DidNotTrain)`` awaits; no verdict is meant by that."""

    # The short summary begins with it, and has room for little: as pytest does with its own.
    __module__ = "builtins"


def failed(message: str) -> BaseException:
    """The outcome to raise; inside an ``except``, raise it ``from None``, or pytest shows both errors."""
    return pytest.fail.Exception(leaving(message), pytrace=False)


def cause(message: str, case: str) -> str:
    """A failure's first line without the case, which the test's id tells: the short summary has little room."""
    kind, of_case, why = message.partition(f": {case}: ")
    return why.partition("\n")[0] if of_case and kind in {"Failed", DidNotTrain.__name__} else message


def refusal_line(excinfo: pytest.ExceptionInfo[BaseException] | None, source: Path) -> str | None:
    """``FILE:LINE: why`` where a SpecError went through ``source``, instead of a page of dataclasses' own source."""
    if excinfo is None or not isinstance(excinfo.value, SpecError):
        return None
    lines = [entry.lineno + 1 for entry in excinfo.traceback if Path(str(entry.path)) == source]
    where = f"{source.name}:{lines[-1]}" if lines else source.name
    return leaving(f"{where}: {excinfo.value}")


# Each measured case is one entry of pytest-benchmark's storage, with its step times as rounds, replayed, not run again,
# through the documented ``timer`` and ``pedantic``. Where absent, disabled or used, nothing is recorded or changed.

#: What a timer of ours tells: each round begins at 0 and ends at its duration, so that no digit is lost.
_CLOCK = pytest.StashKey[list[float]]()


def prepare_benchmark(item: pytest.Item) -> None:
    """Have a perf test's ``benchmark`` fixture read a clock of ours, should it be asked for later."""
    fixtures: list[str] = item.fixturenames  # type: ignore[attr-defined]
    if not item.config.pluginmanager.hasplugin("benchmark") or "benchmark" in fixtures:
        return  # a test that uses benchmark itself keeps it
    marker = item.get_closest_marker("benchmark")
    clock = item.stash[_CLOCK] = [0.0]
    options = {**(marker.kwargs if marker else {}), "timer": lambda: clock[0]}
    # In front of the marker that is there: the closest one wins, and without our timer it would record microseconds.
    item.add_marker(pytest.mark.benchmark(**options), append=False)
    if item.config.getoption("benchmark_only"):
        # It selects by this list. A new one: the one that is there is shared by all cases of a function.
        item.fixturenames = [*fixtures, "benchmark"]  # type: ignore[attr-defined]


def record_benchmark(request: pytest.FixtureRequest, result: CaseResult) -> None:
    """Store the case's steady step times as rounds, and what else was found as ``extra_info``."""
    clock = request.node.stash.get(_CLOCK, None)
    steps = [second for launch in result.launches for second in launch.steady_step_seconds]
    if clock is None or not steps or request.config.getoption("benchmark_skip"):
        return
    if result.verdict == "invalid":
        return  # its times may be no numbers, which would end pytest-benchmark, and the run with it
    del request.node.stash[_CLOCK]  # one entry a test: pytest-benchmark keeps no more
    # Asked for only now: a test that is skipped or fails to launch would leave it unused, which it warns of.
    benchmark: Any = request.getfixturevalue("benchmark")
    pending = iter(steps)

    def tell(seconds: float) -> None:
        clock[0] = seconds

    # One more call than rounds: pytest-benchmark runs the target once more for its return value.
    benchmark.pedantic(lambda: tell(next(pending, 0.0)), setup=lambda: tell(0.0), rounds=len(steps), iterations=1)
    about = {"spec": result.id, "digest": result.digest, "machine": result.machine, "verdict": result.verdict}
    benchmark.extra_info.update({**about, "metrics": {check.metric: check.value for check in result.checks}})


def drop_from_benchmark_table(config: pytest.Config, groups: list[Any], fullnames: set[str]) -> list[Any]:
    """pytest-benchmark's groups without our cases, which have a table of ours; all of them where the user asked."""
    asked = ("benchmark_histogram", "benchmark_compare", "benchmark_verbose")
    if any(config.getoption(name, default=None) for name in asked):
        return groups
    kept = [(name, [entry for entry in entries if entry["fullname"] not in fullnames]) for name, entries in groups]
    return [(name, entries) for name, entries in kept if entries]


def unwritten_benchmarks(config: pytest.Config) -> list[str]:
    """A line where pytest-benchmark was asked for a file and writes none: beside pytest-xdist it only warns, or not."""
    if config.getoption("dist", default="no") == "no":
        return []
    asked = {name: config.getoption(f"benchmark_{name}", default=None) for name in ("json", "save", "autosave")}
    flags = [f"--benchmark-{name}" for name, value in asked.items() if value]
    why = "not written, pytest-benchmark records nothing under pytest-xdist (-n); leave out -n, or take --perf-json"
    return [f"{' '.join(flags)}: {why}"] if flags else []
