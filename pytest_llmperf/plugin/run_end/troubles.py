"""What fails a run and is no test of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_llmperf.engine.dry_run import exceeds, gpu_hours, skip_lines
from pytest_llmperf.plugin.commands import rerun_of
from pytest_llmperf.plugin.run_end.trouble import Trouble
from pytest_llmperf.plugin.session import PerfSession

if TYPE_CHECKING:
    from pytest_llmperf.engine.whole_run import LateVerdict, WholeRun

_MOST_NODES = 3


def troubles_of(session: PerfSession, whole_run: WholeRun) -> Iterator[Trouble]:
    """What no single case can see, and fails the run."""
    from pytest_llmperf.plugin.run_end import unused_baselines

    if whole_run.regressed:
        yield Trouble("regressed, by what the whole run knows", _late(session, whole_run.regressed))
    if whole_run.undecided:
        yield Trouble("not shown to hold, by what the whole run knows", _late(session, whole_run.undecided))
    if whole_run.fails:
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
    if settings.strict and session.idle:
        yield Trouble("tests that measure nothing", [idle_line(session.idle)])
    lost = skip_lines([case for case in skipped if case.lost]) if settings.strict else []
    if lost:
        yield Trouble("cases that ran before", lost)
    if _plans_too_much(session):
        hours = gpu_hours(session.findings.planned)
        yield Trouble("--perf-budget", [f"--perf-budget {settings.budget_gpu_hours:g}: {hours:.2f} GPU-hours planned"])


def idle_line(nodes: Sequence[str]) -> str:
    """The tests that take ``perf`` and passed without it."""
    more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
    return (
        f"takes perf and calls nothing of it: {', '.join(nodes[:_MOST_NODES])}{more}; check a spec, or drop the fixture"
    )


def _late(session: PerfSession, verdicts: Sequence[LateVerdict]) -> list[str]:
    """A line for each, and the command that runs their tests again."""
    command = rerun_of(session, [late.result.nodeid for late in verdicts])
    told = "run again, best with the other cases, by which their GPUs are known"
    return [*(late.line for late in verdicts), f"{told}: {command}"]


def _plans_too_much(session: PerfSession) -> bool:
    return session.settings.dry_run and exceeds(session.findings.planned, session.settings.budget_gpu_hours)
