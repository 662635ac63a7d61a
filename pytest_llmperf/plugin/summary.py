"""Around a run: the line before it, and after it the table, the JSON, unused baselines and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llmperf import __version__
from pytest_llmperf.engine.dry_run import exceeds, gpu_hours, plan_lines, skip_lines
from pytest_llmperf.plugin.benchmark import unwritten
from pytest_llmperf.plugin.commands import rerun_of, rerun_words
from pytest_llmperf.plugin.console import Console
from pytest_llmperf.plugin.options.static_options import without_effect
from pytest_llmperf.plugin.options.width_options import is_case
from pytest_llmperf.plugin.second import first, told
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.plugin.trouble import Trouble
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.text import fold
from pytest_llmperf.run.errors import UsageError

if TYPE_CHECKING:
    from pytest_llmperf.engine.whole_run import LateVerdict, WholeRun


def header(session: PerfSession, items: list[pytest.Item]) -> list[str]:
    """About where the cases run, and what they do not see; nothing where no perf test was collected."""
    cases = sum(map(is_case, items))
    if not cases or session.config.get_verbosity() < 0:
        return []
    where = f"{session.num_gpus} GPU(s)" if not session.on_cpu else "the CPU (gloo)"
    if session.settings.static:
        where = "nothing is launched"
    baselines = os.path.relpath(session.settings.baselines, session.config.invocation_params.dir)
    found = None if session.settings.against else first(session.config)
    ignored = without_effect(session.config)
    takes = session.progress.whole if session.progress is not None else ""
    parts = [f"llmperf: {cases} case(s) on {session.machine_kind}", where, f"baselines {baselines}", takes]
    return [
        ", ".join(filter(None, parts)),
        *([f"llmperf: {ignored}"] if ignored else []),
        *([f"llmperf: {told(session.config, found)}"] if found else []),
    ]


#: On the page.
MADE_BY = f"pytest-llmperf {__version__}"

#: Under which a worker of xdist leaves its controller the line of a usage error.
REFUSED = "llmperf_refused"


def refuse_from_worker(session: PerfSession) -> None:
    """Ask for the hardware, as the header does without xdist: a usage error that only tests met would be a crash.

    Raises:
        UsageError: it cannot serve.
    """
    try:
        _ = session.machine_kind
    except UsageError as error:
        session.config.workeroutput[REFUSED] = str(error)  # type: ignore[attr-defined]
        raise


def finish(session: PerfSession, pytest_session: pytest.Session) -> None:
    """Write the JSON and let the run fail for what no single case can see; runs in the controller alone."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["llmperf"] = session.coverage.to_dict()
        return
    if session.job is not None:
        session.job.note_spent()
    if session.ends_with:
        pytest_session.exitstatus = session.ends_with
    if session.unfinished or pytest_session.exitstatus == pytest.ExitCode.INTERRUPTED:
        session.coverage.parts.add("the run was ended before its end")  # workers of xdist no longer tell
    if not _concerned(session):
        return
    from pytest_llmperf.engine.whole_run import judged_together

    _record_static(session, pytest_session.exitstatus)
    whole_run = session.whole_run = judged_together(session, session.findings.results)
    session.findings.results = list(whole_run.results)
    troubles = list(_troubles(session, whole_run))
    troubles += _write_markdown(session, int(pytest_session.exitstatus), troubles)
    if troubles:
        _fail(pytest_session)
    written = list(_write(session, pytest_session))
    if written:
        _fail(pytest_session)
    for trouble in (*troubles, *written):
        trouble.tell(session.config)


def _write(session: PerfSession, pytest_session: pytest.Session) -> Iterator[Trouble]:
    """The files that were asked for, and what could not be written."""
    settings = session.settings
    stopped = bool(pytest_session.shouldstop or pytest_session.shouldfail)
    if settings.json is not None:
        from pytest_llmperf.report.results_json import write_json

        try:
            write_json(settings.json, _document(session, int(pytest_session.exitstatus), stopped=stopped))
        except OSError as error:
            _fail(pytest_session)
            yield Trouble("--perf-json", [f"--perf-json {settings.json}: not written ({error})"])
    _keep_history(session, int(pytest_session.exitstatus), stopped=stopped)
    if settings.report is not None:
        from pytest_llmperf.engine.run_page.page_file import write_page
        from pytest_llmperf.engine.run_page.run_document import RunDocument

        run = RunDocument(_document(session, int(pytest_session.exitstatus), stopped=stopped))
        why = write_page(settings.report, [run], settings.baselines, made_by=MADE_BY, history=settings.history)
        if why:
            yield Trouble("--perf-report", [f"--perf-report {why}"])


def _keep_history(session: PerfSession, exit_code: int, *, stopped: bool) -> None:
    path = session.settings.history
    if path is None or not any(result.launches for result in session.findings.results):
        return
    from pytest_llmperf.engine.history.keeping import keep

    trouble = keep(path, _document(session, exit_code, stopped=stopped))
    session.notes += [trouble] if trouble else []


def _write_markdown(session: PerfSession, exit_code: int, troubles: list[Trouble]) -> list[Trouble]:
    """The pages that are wanted, and what of them could not be written."""
    if session.settings.markdown is None and session.settings.step_summary is None:
        return []
    from pytest_llmperf.plugin import markdown_files

    document = _document(session, exit_code, stopped=False)
    unwritten, notes = markdown_files.write(session.settings, document, troubles)
    session.notes += notes
    return unwritten


def _record_static(session: PerfSession, exit_code: int) -> None:
    """Beside what this run has recorded, once nothing of it trains any more."""
    settings, results = session.settings, session.findings.results
    if settings.static or settings.update not in ("new", "all") or session.unfinished:
        return
    if exit_code == pytest.ExitCode.INTERRUPTED:  # somebody waits for the end
        return
    if any(result.updated for result in results):
        from pytest_llmperf.engine.static.static_recording import record_static

        session.notes += record_static(session, results, Console(session.config))


def _troubles(session: PerfSession, whole_run: WholeRun) -> Iterator[Trouble]:
    """What no single case can see, and fails the run."""
    from pytest_llmperf.plugin import unused_baselines

    if whole_run.regressed:
        yield Trouble("regressed, by what the whole run knows", _late(session, whole_run.regressed))
    if whole_run.undecided:
        yield Trouble("not shown to hold, by what the whole run knows", _late(session, whole_run.undecided))
    if whole_run.verdict == "regressed":
        yield Trouble("all cases", [whole_run.line])
    if whole_run.unjudged:
        yield Trouble("the whole run", [whole_run.unjudged])
    settings, skipped = session.settings, session.findings.skipped
    refused = unused_baselines.prune(session) if settings.update == "prune" else ""
    if refused:
        yield Trouble("prune", [refused])
    left = unused_baselines.listed(session) if settings.strict and not session.unfinished else []
    if left:
        yield Trouble("unused baselines", left)
    lost = skip_lines([case for case in skipped if case.lost]) if settings.strict else []
    if lost:
        yield Trouble("cases that ran before", lost)
    if _plans_too_much(session):
        hours = gpu_hours(session.findings.planned)
        yield Trouble("--perf-budget", [f"--perf-budget {settings.budget_gpu_hours:g}: {hours:.2f} GPU-hours planned"])


def _late(session: PerfSession, verdicts: Sequence[LateVerdict]) -> list[str]:
    """A line for each, and the command that runs their tests again."""
    command = rerun_of(session, [late.result.nodeid for late in verdicts])
    told = "run again, best with the other cases, by which their GPUs are known"
    return [*(late.line for late in verdicts), f"{told}: {command}"]


def summarise(session: PerfSession, reporter: pytest.TerminalReporter) -> None:
    """The table at the end; a dry run's plan instead."""
    if not _concerned(session):
        return
    from pytest_llmperf.plugin.unused_baselines import listed

    lines = _folded([*session.told, *unwritten(session.config)], reporter)
    if session.settings.against_itself:
        lines.append(f"--perf-against {session.settings.against}: the same environment on both sides")
    if session.settings.dry_run and session.settings.update != "prune":
        from pytest_llmperf.run.gpu_hours import cost_lines, planned_gpu_seconds

        planned, price = session.findings.planned, session.settings.price
        costs = cost_lines(planned_gpu_seconds(planned), price) if price else []
        lines = plan_lines(planned, session.settings.budget_gpu_hours) + costs + lines
    elif session.findings.results or session.findings.spent.launches:
        lines = _table(session, reporter) + lines
    lines += _folded([*skip_lines(session.findings.skipped), *listed(session)], reporter)
    if not lines:
        return
    reporter.section("llmperf", "=")
    for line in lines:
        reporter.write_line(line)


def _table(session: PerfSession, reporter: pytest.TerminalReporter) -> list[str]:
    from pytest_llmperf.judge.host_shift import host_shift, wide_gates
    from pytest_llmperf.judge.static.upgrade_news import upgrade_lines
    from pytest_llmperf.report.summary_table import summary_lines
    from pytest_llmperf.report.time_spent import longest_lines
    from pytest_llmperf.run.gpu_hours import cost_lines

    whole_run = session.whole_run
    results, width = session.findings.results, reporter._tw.fullwidth if reporter.isatty else None
    spent = session.findings.spent
    table = summary_lines(_priced(session), width, reporter._tw.hasmarkup, sys.stdout.encoding, spent)
    costs = cost_lines(spent.gpu_seconds, session.settings.price)
    most = reporter.config.getoption("durations", None)  # pytest's own, which tells of whole tests; 0: all
    longest = [] if most is None else longest_lines(results, most)
    upgrade = upgrade_lines(results) if session.settings.static else []
    common = whole_run.line if whole_run and whole_run.change else host_shift(results)
    below = [*upgrade, *costs, *filter(None, [wide_gates(results)]), *longest]
    return [*_folded(filter(None, [common]), reporter), *table, *_folded(below, reporter)]


def _folded(lines: Iterable[str], reporter: pytest.TerminalReporter) -> list[str]:
    """For a terminal, whose own way to break a line is within a word; a file gets lines as long as they are."""
    width = reporter._tw.fullwidth if reporter.isatty else None
    return [part for line in lines for part in fold(line, width, indent="  ") or [""]]


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


def _document(session: PerfSession, exit_code: int, *, stopped: bool) -> dict[str, Any]:
    from pytest_llmperf.report.results_json import document
    from pytest_llmperf.run.gpu_hours import cost_document

    spent = session.findings.spent
    values = document(session.machine_document(), _priced(session), spent) | {"exit_code": exit_code}
    values |= cost_document(spent.gpu_seconds, session.settings.price)
    if session.findings.results:
        values["rerun"] = rerun_words(session)
    if any(result.launches for result in session.findings.results):
        values |= session.revision.document()
    if session.whole_run:
        values |= session.whole_run.document()
    if session.findings.skipped:
        values["skipped"] = [vars(case) for case in session.findings.skipped]
    if session.settings.dry_run:
        values["planned"] = [vars(case) for case in session.findings.planned]
    if session.settings.dry_run or session.settings.width:
        values["suite"] = _suite(session) | {"stopped": stopped}
    # pytest ends so too where it could not collect: that it says itself.
    was_interrupted = exit_code == pytest.ExitCode.INTERRUPTED and not session.could_not_collect
    unfinished = session.unfinished or ("interrupted" if was_interrupted else "")
    return values | ({"unfinished": unfinished} if unfinished else {})


def _suite(session: PerfSession) -> dict[str, Any]:
    """What `llmperf merge` needs to tell of several widths together what each alone cannot."""
    from pytest_llmperf.plugin import unused_baselines

    settings = session.settings
    return {
        "perf_width": settings.width.gpus if settings.width else None,
        "strict": settings.strict,
        "rootdir": str(session.config.rootpath),
        "baselines": str(settings.baselines),
        "digests": sorted(set(session.findings.digests)),
        "coverage": unused_baselines.seen(session).to_dict(),
    }


def _priced(session: PerfSession) -> list[CaseResult]:
    """A CPU has no GPU-hours, and so no price."""
    from pytest_llmperf.run.gpu_hours import priced

    return priced(session.findings.results, None if session.on_cpu else session.settings.price)


def _plans_too_much(session: PerfSession) -> bool:
    return session.settings.dry_run and exceeds(session.findings.planned, session.settings.budget_gpu_hours)


def _concerned(session: PerfSession) -> bool:
    findings = session.findings
    settings = session.settings
    asked = settings.json or settings.report or settings.markdown or settings.update == "prune"
    return bool(findings.results or findings.planned or findings.digests or asked)


def _fail(pytest_session: pytest.Session) -> None:
    if pytest_session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        pytest_session.exitstatus = pytest.ExitCode.TESTS_FAILED
