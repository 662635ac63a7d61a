"""The lines before a run: where its cases run, and what they do not see."""

from __future__ import annotations

import os

import pytest

from pytest_llmperf.plugin import command_line, is_case
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.run.errors import UsageError
from pytest_llmperf.run.reading import without_effect

#: Under which a worker of xdist leaves its controller the line of a usage error.
REFUSED = "llmperf_refused"

_FIRST = "no baseline yet: a case without one fails as new, with its figures; --update-baselines=new records them"


def header(session: PerfSession, items: list[pytest.Item]) -> list[str]:
    """About where the cases run, and what they do not see; nothing where no perf test was collected."""
    cases = sum(map(is_case, items))
    if not cases or session.config.get_verbosity() < 0:
        return []
    where = f"{session.num_gpus} GPU(s)" if not session.on_cpu else "the CPU (gloo)"
    if session.settings.static:
        where = "nothing is launched"
    baselines = os.path.relpath(session.settings.baselines, session.config.invocation_params.dir)
    found = None if session.settings.against else command_line.baselines_further_up(session.config)
    ignored = without_effect(session.config.option) if session.settings.static else ""
    progress = session.progress
    takes = progress.whole if progress is not None else ""
    # Who has just begun would take a screen of failures for a fault.
    is_first = progress is not None and progress.is_first and not (session.settings.update or session.settings.against)
    parts = [f"llmperf: {cases} case(s) on {session.machine_kind}", where, f"baselines {baselines}", takes]
    return [
        ", ".join(filter(None, parts)),
        *([f"llmperf: {_FIRST}"] if is_first else []),
        *([f"llmperf: {ignored}"] if ignored else []),
        *([f"llmperf: {command_line.further_up_line(session.config, found)}"] if found else []),
    ]


def refuse_from_worker(session: PerfSession) -> None:
    """Ask for the hardware, as the header does without xdist: a usage error that only tests met would be a crash.

    Raises:
        UsageError: it cannot serve.
    """
    try:
        _ = session.machine_kind
        session.check_interpreter()
    except UsageError as error:
        session.config.workeroutput[REFUSED] = str(error)  # type: ignore[attr-defined]
        raise
