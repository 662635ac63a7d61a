"""Once all tests are over: the run is judged as a whole, written, and failed for what no single case can see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_llmperf.plugin.console import Console
from pytest_llmperf.plugin.run_end.run_document import MADE_BY, run_document
from pytest_llmperf.plugin.run_end.summary import is_concerned
from pytest_llmperf.plugin.run_end.trouble import Trouble
from pytest_llmperf.plugin.run_end.troubles import troubles_of
from pytest_llmperf.plugin.session import PerfSession


def finish(session: PerfSession, pytest_session: pytest.Session) -> None:
    """Write the JSON and let the run fail for what no single case can see; runs in the controller alone."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["llmperf"] = session.coverage.to_dict()
        session.config.workeroutput["llmperf_collected"] = sorted(session.collected)
        return
    if session.in_job:
        session.job.note_spent()
    if session.ends_with:
        pytest_session.exitstatus = session.ends_with
    if session.unfinished or pytest_session.exitstatus == pytest.ExitCode.INTERRUPTED:
        session.coverage.parts.add("the run was ended before its end")  # workers of xdist no longer tell
    if not is_concerned(session):
        return
    from pytest_llmperf.engine.whole_run import judged_together
    from pytest_llmperf.plugin.run_end.replaced_cases import settle

    unexplained = settle(session)
    _record_static(session, pytest_session.exitstatus)
    whole_run = session.whole_run = judged_together(session, session.findings.results)
    session.findings.results = list(whole_run.results)
    troubles = list(troubles_of(session, whole_run))
    troubles += [Trouble("replaced cases", unexplained)] if unexplained else []
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
            write_json(settings.json, run_document(session, int(pytest_session.exitstatus), stopped=stopped))
        except OSError as error:
            _fail(pytest_session)
            yield Trouble("--perf-json", [f"--perf-json {settings.json}: not written ({error})"])
    _keep_history(session, int(pytest_session.exitstatus), stopped=stopped)
    if settings.report is not None:
        from pytest_llmperf.engine.run_page.run_document import RunDocument
        from pytest_llmperf.engine.run_page.run_page import write_page

        run = RunDocument(run_document(session, int(pytest_session.exitstatus), stopped=stopped))
        page = write_page(settings.report, [run], settings.baselines, made_by=MADE_BY, history=settings.history)
        if page.why_none:
            yield Trouble("--perf-report", [f"--perf-report {page.why_none}"])
        session.notes += [f"--perf-report {settings.report}: {line}" for line in page.without]


def _keep_history(session: PerfSession, exit_code: int, *, stopped: bool) -> None:
    path = session.settings.history
    if path is None or not any(result.launches for result in session.findings.results):
        return
    from pytest_llmperf.engine.history.keeping import keep

    trouble = keep(path, run_document(session, exit_code, stopped=stopped))
    session.notes += [trouble] if trouble else []


def _write_markdown(session: PerfSession, exit_code: int, troubles: list[Trouble]) -> list[Trouble]:
    """The pages that are wanted, and what of them could not be written."""
    if session.settings.markdown is None and session.settings.step_summary is None:
        return []
    from pytest_llmperf.plugin.run_end import markdown_files

    document = run_document(session, exit_code, stopped=False)
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
        from pytest_llmperf.engine.static_check import record_static

        session.notes += record_static(session, results, Console(session.config))


def _fail(pytest_session: pytest.Session) -> None:
    if pytest_session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        pytest_session.exitstatus = pytest.ExitCode.TESTS_FAILED
