"""The run as ``--perf-json`` has it, for whoever writes it somewhere."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import Any

import pytest

from pytest_llmperf import __version__
from pytest_llmperf.plugin.commands import rerun_words
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.records.result import CaseResult

#: On the page.
MADE_BY = f"pytest-llmperf {__version__}"


def run_document(session: PerfSession, exit_code: int, *, stopped: bool) -> dict[str, Any]:
    from pytest_llmperf.launch.slurm.allocation import job_key
    from pytest_llmperf.report.results_json import document
    from pytest_llmperf.run.gpu_hours import cost_document
    from pytest_llmperf.run.revision import project_of

    spent, ended_at = session.findings.spent, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    values = document(session.machine_document(), priced_results(session), spent)
    values |= {"exit_code": exit_code, "ended_at": ended_at}
    values |= cost_document(spent.gpu_seconds, session.settings.price)
    if session.outcomes_of_tests:
        values["tests"] = list(session.outcomes_of_tests.values())
    if session.findings.results:
        values["rerun"] = rerun_words(session)
    if any(result.launches for result in session.findings.results):
        values |= session.revision.document() | {"project": project_of(session.rootdir)}
    if job := job_key(os.environ):
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        values["slurm"] = {"job": job, "starts": 1 + (int(restarts) if restarts.isdigit() else 0)}
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
    from pytest_llmperf.support.files import files_digest

    settings = session.settings
    return {
        "perf_width": settings.width.gpus if settings.width else None,
        "strict": settings.strict,
        "rootdir": str(session.config.rootpath),
        "baselines": str(settings.baselines),
        # Which a run that records makes another.
        "baselines_digest": "" if settings.update else files_digest(settings.baselines, "*.json"),
        "digests": sorted(set(session.findings.digests)),
        "coverage": unused_baselines.seen(session).to_dict(),
    }


def priced_results(session: PerfSession) -> list[CaseResult]:
    """A CPU has no GPU-hours, and so no price."""
    from pytest_llmperf.run.gpu_hours import priced

    return priced(session.findings.results, None if session.on_cpu else session.settings.price)
