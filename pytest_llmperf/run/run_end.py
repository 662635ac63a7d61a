"""The end of a run: it is judged as a whole, fails for what no single case can see, and its files are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from pytest_llmperf.records.results_document import document_of
from pytest_llmperf.report.exports import ExportedRun, markdown_page
from pytest_llmperf.report.results_json import RunDocument, document, write_json
from pytest_llmperf.run.findings import Findings, Observer
from pytest_llmperf.run.history import keep, project_of
from pytest_llmperf.run.leftovers import listed, seen, unexplained
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.static_check import record_static
from pytest_llmperf.run.whole_run import LateVerdict, WholeRun, judged_together, skip_lines, unjudged_line
from pytest_llmperf.support.files import files_digest, write_text
from pytest_llmperf.support.formats import first_n

# The exit codes of pytest that say that nothing failed.
_GREEN = (0, 5)

_MOST_NODES = 3


@dataclass(frozen=True)
class Trouble:
    """One reason why a run fails in which every case may have passed, by name: ``unused baselines``."""

    name: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Finished:
    exit_code: int
    whole_run: WholeRun
    troubles: Sequence[Trouble]
    """What no single case can see, and fails the run."""


def finish(run: Run, exit_code: int, observer: Observer, *, stopped: bool) -> Finished:
    """Judge the run as a whole and write what was asked for; as ``Run.finish``."""
    settings, findings = run.settings, run.findings
    replaced = unexplained(run)
    updates = settings.update and any(result.updated for result in findings.results)
    if updates and not settings.static and not run.unfinished:  # else somebody waits for the end
        # Beside what this run has recorded, once nothing of it trains any more.
        run.notes += record_static(run.caller("static figures", observer, findings=Findings()), findings.results)
    if settings.static and findings.skipped and not findings.results:
        run.notes.append(unjudged_line(findings.skipped))
    whole_run = judged_together(run, findings.results)
    findings.results = list(whole_run.results)
    troubles = [*_troubles(run, whole_run), *([Trouble("replaced cases", replaced)] if replaced else [])]
    if settings.markdown is not None:
        lines = [line for trouble in troubles for line in trouble.lines]
        values = {**run_document(run, whole_run, exit_code, stopped=False), "troubles": lines}
        try:
            write_text(settings.markdown, "\n".join([*markdown_page(ExportedRun.of(document_of(values))), ""]))
        except OSError as error:
            troubles.append(Trouble("--perf-markdown", [f"--perf-markdown {settings.markdown}: not written ({error})"]))
    exit_code = _failed(exit_code) if troubles else exit_code
    written = list(_written(run, whole_run, exit_code, stopped=stopped))
    return Finished(_failed(exit_code) if written else exit_code, whole_run, [*troubles, *written])


def _written(run: Run, whole_run: WholeRun, exit_code: int, *, stopped: bool) -> Iterator[Trouble]:
    """What of the files that were asked for could not be written."""
    settings = run.settings
    launched = settings.history is not None and any(result.launches for result in run.findings.results)
    if not (settings.json or settings.report or launched):
        return
    values = run_document(run, whole_run, exit_code, stopped=stopped)
    if settings.json is not None:
        try:
            write_json(settings.json, values)
        except OSError as error:
            values["exit_code"] = _failed(exit_code)
            yield Trouble("--perf-json", [f"--perf-json {settings.json}: not written ({error})"])
    if launched and settings.history is not None:
        run.notes += filter(None, [keep(settings.history, values)])
    if settings.report is not None:
        from pytest_llmperf.run.run_page import write_page

        runs = [RunDocument(values)]
        why_none, without = write_page(settings.report, runs, settings.baselines, settings.history)
        run.notes += [f"--perf-report {settings.report}: {line}" for line in without]
        if why_none:
            yield Trouble("--perf-report", [f"--perf-report {why_none}"])


def _troubles(run: Run, whole_run: WholeRun) -> list[Trouble]:
    findings, is_strict = run.findings, run.settings.strict
    lost = [case for case in findings.skipped if case.lost]
    found = {
        "regressed, by what the whole run knows": _late(run, whole_run.regressed),
        "not shown to hold, by what the whole run knows": _late(run, whole_run.undecided),
        "all cases": [whole_run.line] if whole_run.fails else [],
        "the whole run": [whole_run.unjudged],
        "launches that ended with an error": run.bad_ends,
        "unused baselines": listed(run) if is_strict and run.has_suite and not run.unfinished else [],
        "tests that measure nothing": [idle_line(run.idle)] if is_strict and run.idle else [],
        "cases that ran before": skip_lines(lost) if is_strict else [],
    }
    return [Trouble(name, lines) for name, each in found.items() if (lines := [line for line in each if line])]


def _late(run: Run, verdicts: Sequence[LateVerdict]) -> list[str]:
    command = run.rerun_of([late.result.nodeid for late in verdicts]) if verdicts else ""
    again = f"run again, best with the other cases, by which their GPUs are known: {command}" if command else ""
    return [*(late.line for late in verdicts), again]


def idle_line(nodes: Sequence[str]) -> str:
    return f"takes perf and calls nothing of it: {first_n(nodes, _MOST_NODES)}; check a spec, or drop the fixture"


def _failed(exit_code: int) -> int:
    return 1 if exit_code in _GREEN else exit_code


def run_document(run: Run, whole_run: WholeRun, exit_code: int, *, stopped: bool) -> dict[str, Any]:
    """The run as ``--perf-json`` has it. ``stopped``: tests were left out once it had begun."""
    settings, findings = run.settings, run.findings
    spent, ended_at = findings.spent, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    values = document(run.machine_document(), findings.results, spent)
    values |= {"exit_code": exit_code, "ended_at": ended_at}
    values |= {"cost": {"gpu_hours": spent.gpu_seconds / 3600}} if spent.gpu_seconds > 0 else {}
    soaks = [result.soak for result in findings.results if result.soak]
    versions = next((one.environment.versions for one in soaks if one.environment), run.static_versions)
    told = {"tests": list(run.tests.values()), "command": run.command, "versions": dict(versions)}
    told["rerun"] = run.rerun_words() if findings.results else []
    values |= {name: each for name, each in told.items() if each}
    if soaks or any(result.launches for result in findings.results):
        values |= run.revision.document() | {"project": project_of(run.rootdir)}
    values |= run.job_document() | whole_run.document()
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
