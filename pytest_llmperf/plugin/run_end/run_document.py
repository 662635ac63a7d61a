"""The run as ``--perf-json`` has it, for whoever writes it somewhere."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_llmperf import __version__
from pytest_llmperf.plugin.commands import rerun_words
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.records.result import CaseResult

#: On the page.
MADE_BY = f"pytest-llmperf {__version__}"


def run_document(session: PerfSession, exit_code: int, *, stopped: bool) -> dict[str, Any]:
    from pytest_llmperf.report.results_json import document
    from pytest_llmperf.run.gpu_hours import cost_document
    from pytest_llmperf.run.revision import project_of

    spent = session.findings.spent
    values = document(session.machine_document(), priced_results(session), spent) | {"exit_code": exit_code}
    values |= cost_document(spent.gpu_seconds, session.settings.price)
    if session.findings.results:
        values["rerun"] = rerun_words(session)
    if any(result.launches for result in session.findings.results):
        values |= session.revision.document() | {"project": project_of(session.rootdir)}
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
    from pytest_llmperf.plugin.run_end import unused_baselines

    settings = session.settings
    return {
        "perf_width": settings.width.gpus if settings.width else None,
        "strict": settings.strict,
        "rootdir": str(session.config.rootpath),
        "baselines": str(settings.baselines),
        "digests": sorted(set(session.findings.digests)),
        "coverage": unused_baselines.seen(session).to_dict(),
    }


def priced_results(session: PerfSession) -> list[CaseResult]:
    """A CPU has no GPU-hours, and so no price."""
    from pytest_llmperf.run.gpu_hours import priced

    return priced(session.findings.results, None if session.on_cpu else session.settings.price)
