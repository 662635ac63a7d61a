"""The end of a run: it is judged as a whole, written, and fails for what no single case can see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_llmperf.run.findings import Observer
from pytest_llmperf.run.plan import exceeds, gpu_hours, skip_lines
from pytest_llmperf.run.run_files import run_document, write_markdown, write_page, write_results
from pytest_llmperf.run.stale_baselines import listed, prune, unexplained
from pytest_llmperf.run.static_check import record_static
from pytest_llmperf.run.whole_run import LateVerdict, WholeRun, judged_together

if TYPE_CHECKING:
    from pytest_llmperf.run.run import Run

# The exit codes of pytest that say that nothing failed.
_GREEN = (0, 5)

_MOST_NODES = 3


@dataclass(frozen=True)
class Trouble:
    """One reason why a run fails in which every case may have passed."""

    name: str
    """As ``unused baselines``."""
    lines: Sequence[str]


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    exit_code: int
    whole_run: WholeRun
    troubles: Sequence[Trouble]
    """What no single case can see, and fails the run."""


def finish(run: Run, exit_code: int, observer: Observer, *, stopped: bool) -> Finished:
    """Judge the run as a whole and write what was asked for.

    ``exit_code`` is what its cases make of it so far; ``stopped``: the front-end ended it before its last case.
    """
    settings, findings = run.settings, run.findings
    replaced = unexplained(run)
    updates = settings.update in {"new", "all"} and any(result.updated for result in findings.results)
    if updates and not settings.static and not run.unfinished:  # else somebody waits for the end
        # Beside what this run has recorded, once nothing of it trains any more.
        run.notes += record_static(run, findings.results, observer)
    whole_run = judged_together(run, findings.results)
    findings.results = list(whole_run.results)
    troubles = [*_troubles(run, whole_run), *([Trouble("replaced cases", replaced)] if replaced else [])]
    if settings.markdown is not None or settings.step_summary is not None:
        lines = [line for trouble in troubles for line in trouble.lines]
        refused = write_markdown(run, run_document(run, whole_run, exit_code, stopped=False), lines)
        troubles += [Trouble("--perf-markdown", [refused])] if refused else []
    exit_code = _failed(exit_code) if troubles else exit_code
    written = list(_written(run, whole_run, exit_code, stopped=stopped))
    return Finished(_failed(exit_code) if written else exit_code, whole_run, [*troubles, *written])


def _written(run: Run, whole_run: WholeRun, exit_code: int, *, stopped: bool) -> Iterator[Trouble]:
    """The files that were asked for, and what could not be written."""
    settings = run.settings
    launched = settings.history is not None and any(result.launches for result in run.findings.results)
    if not (settings.json or settings.report or launched):
        return
    values = run_document(run, whole_run, exit_code, stopped=stopped)
    if refused := write_results(run, values):
        values["exit_code"] = _failed(exit_code)
        yield Trouble("--perf-json", [refused])
    if launched and settings.history is not None:
        from pytest_llmperf.run.history.history import keep

        run.notes += filter(None, [keep(settings.history, values)])
    if refused := write_page(run, values):
        yield Trouble("--perf-report", [refused])


def _troubles(run: Run, whole_run: WholeRun) -> list[Trouble]:
    settings, findings, is_strict = run.settings, run.findings, run.settings.strict
    lost = [case for case in findings.skipped if case.lost]
    budget, planned = settings.budget_gpu_hours, findings.planned
    over = f"--perf-budget {budget:g}: {gpu_hours(planned):.2f} GPU-hours planned" if exceeds(planned, budget) else ""
    found = {
        "regressed, by what the whole run knows": _late(run, whole_run.regressed),
        "not shown to hold, by what the whole run knows": _late(run, whole_run.undecided),
        "all cases": [whole_run.line] if whole_run.fails else [],
        "the whole run": [whole_run.unjudged],
        "prune": [prune(run) if settings.update == "prune" else ""],
        "unused baselines": listed(run) if is_strict and run.has_suite and not run.unfinished else [],
        "tests that measure nothing": [idle_line(run.idle)] if is_strict and run.idle else [],
        "cases that ran before": skip_lines(lost) if is_strict else [],
        "--perf-budget": [over if settings.dry_run else ""],
    }
    return [Trouble(name, lines) for name, each in found.items() if (lines := [line for line in each if line])]


def _late(run: Run, verdicts: Sequence[LateVerdict]) -> list[str]:
    """A line for each, and the command that runs their tests again."""
    command = run.rerun_of([late.result.nodeid for late in verdicts]) if verdicts else ""
    again = f"run again, best with the other cases, by which their GPUs are known: {command}" if command else ""
    return [*(late.line for late in verdicts), again]


def idle_line(nodes: Sequence[str]) -> str:
    """The tests that take ``perf`` and passed without it."""
    more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
    return (
        f"takes perf and calls nothing of it: {', '.join(nodes[:_MOST_NODES])}{more}; check a spec, or drop the fixture"
    )


def _failed(exit_code: int) -> int:
    return 1 if exit_code in _GREEN else exit_code
