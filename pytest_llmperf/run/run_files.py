"""The files of a run that is over: its results for ``--perf-json``, its history, its pages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_llmperf.launch.slurm.allocation import job_key
from pytest_llmperf.records.results_document import document_of
from pytest_llmperf.report.results_json import document, write_json
from pytest_llmperf.run.plan import cost_document, priced
from pytest_llmperf.run.revision import project_of
from pytest_llmperf.run.stale_baselines import seen
from pytest_llmperf.run.whole_run import WholeRun
from pytest_llmperf.support import MADE_BY
from pytest_llmperf.support.files import files_digest, write_text

if TYPE_CHECKING:
    from pytest_llmperf.run.run import Run

# GitHub refuses the whole summary of a step that is larger than a MiB, also what others wrote into it.
_MOST_BYTES = 2**20


def run_document(run: Run, whole_run: WholeRun, exit_code: int, *, stopped: bool) -> dict[str, Any]:
    """The run as ``--perf-json`` has it. ``stopped``: tests were left out once it had begun."""
    settings, findings = run.settings, run.findings
    spent, ended_at = findings.spent, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    # A CPU has no GPU-hours, and so no price.
    results = priced(findings.results, None if run.on_cpu else settings.price)
    values = document(run.machine_document(), results, spent)
    values |= {"exit_code": exit_code, "ended_at": ended_at} | cost_document(spent.gpu_seconds, settings.price)
    if run.tests:
        values["tests"] = list(run.tests.values())
    if run.command:
        values["command"] = run.command
    if run.static_versions:
        values["versions"] = dict(run.static_versions)
    if findings.results and (rerun := run.rerun_words()):
        values["rerun"] = rerun
    if any(result.launches for result in findings.results):
        values |= run.revision.document() | {"project": project_of(run.rootdir)}
    if job := job_key(os.environ):
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        values["slurm"] = {"job": job, "starts": 1 + (int(restarts) if restarts.isdigit() else 0)}
    values |= whole_run.document()
    if findings.skipped:
        values["skipped"] = [vars(case) for case in findings.skipped]
    if settings.dry_run:
        values["planned"] = [vars(case) for case in findings.planned]
    if settings.dry_run or settings.width:
        # What `llmperf merge` needs to tell of several widths together what each alone cannot.
        values["suite"] = {
            "perf_width": settings.width.gpus if settings.width else None,
            "strict": settings.strict,
            "rootdir": str(run.rootdir),
            "baselines": str(settings.baselines),
            # Which a run that records makes another.
            "baselines_digest": "" if settings.update else files_digest(settings.baselines, "*.json"),
            "digests": sorted(set(findings.digests)),
            "coverage": seen(run).to_dict(),
            "stopped": stopped,
        }
    return values | ({"unfinished": run.unfinished} if run.unfinished else {})


def write_results(run: Run, values: Mapping[str, Any]) -> str:
    """Write what ``--perf-json`` asks for; why it was not written."""
    if run.settings.json is None:
        return ""
    try:
        write_json(run.settings.json, values)
    except OSError as error:
        return f"--perf-json {run.settings.json}: not written ({error})"
    return ""


def write_page(run: Run, values: Mapping[str, Any]) -> str:
    """Write the page that ``--perf-report`` asks for; why there is none."""
    from pytest_llmperf.report.run_document import RunDocument
    from pytest_llmperf.run.run_page.written_page import write_page as write

    path, settings = run.settings.report, run.settings
    if path is None:
        return ""
    page = write(path, [RunDocument(values)], settings.baselines, made_by=MADE_BY, history=settings.history)
    run.notes += [f"--perf-report {path}: {line}" for line in page.without]
    return page.why_none and f"--perf-report {page.why_none}"


def write_markdown(run: Run, values: Mapping[str, Any], troubles: Sequence[str]) -> str:
    """Write the pages of Markdown that are wanted; why ``--perf-markdown`` was not written."""
    from pytest_llmperf.report.consumers.documents import markdown_page
    from pytest_llmperf.report.consumers.exported_run import ExportedRun

    settings, refused = run.settings, ""
    told = ExportedRun.read([document_of({**values, "troubles": list(troubles)})])
    page = markdown_page(told)
    if settings.markdown is not None:
        try:
            write_text(settings.markdown, "\n".join([*page, ""]))
        except OSError as error:
            refused = f"--perf-markdown {settings.markdown}: not written ({error})"
    is_news = told.cases or told.skipped or told.troubles
    if settings.step_summary is not None and is_news and not settings.dry_run:
        try:
            run.notes += _append(settings.step_summary, page)
        except OSError as error:  # nobody asked for it: no reason for a run to fail
            run.notes.append(f"GITHUB_STEP_SUMMARY {settings.step_summary}: not written ({error})")
    return refused


def _append(path: Path, page: Sequence[str]) -> list[str]:
    from pytest_llmperf.report.consumers.documents import within

    size = path.stat().st_size if path.exists() else 0
    text = within(["", *page] if size else page, _MOST_BYTES - size)
    if not text:
        return [f"GITHUB_STEP_SUMMARY {path}: not written, it has {size} bytes already, and may have {_MOST_BYTES}"]
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return []
