"""Leftovers: the baselines that no case of this run has, listed, or removed where that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.curves.curve_store import CurveStore
from pytest_llmperf.judge.static.step_store import StepStore
from pytest_llmperf.judge.store import BaselineStore, Entry
from pytest_llmperf.plugin.selection import gaps, partly
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.run.coverage import Coverage, file_of, unused_baselines


def _entries(session: PerfSession) -> list[Entry]:
    root = session.settings.baselines
    # What a run without launches judges is of no machine kind, and of all.
    launched = [] if session.settings.static else BaselineStore(root).entries(session.machine_kind)
    curves = [] if session.settings.static else CurveStore(root).entries(on_cpu=session.on_cpu)
    return [*launched, *StepStore(root).entries(on_cpu=session.on_cpu), *curves]


def _unused(session: PerfSession, entries: Sequence[Entry]) -> list[Path]:
    """Baselines that no case of this run has; none where not every case was asked."""
    return unused_baselines(entries, set(session.findings.digests), _seen(session, entries), session.config.rootpath)


def _seen(session: PerfSession, entries: Sequence[Entry]) -> Coverage:
    """What this run saw, and what its options may have hidden from it."""
    coverage, config = session.coverage, session.config
    coverage.parts |= set(partly(config))
    coverage.gaps |= set(gaps(config, session.settings.baselines, [file_of(entry.recorded_by) for entry in entries]))
    return coverage


def seen(session: PerfSession) -> Coverage:
    """What this run saw; without its baselines, where these cannot be read, nobody can tell what is unused."""
    try:
        return _seen(session, _entries(session))
    except BaselineError:
        return _seen(session, [])


def listed(session: PerfSession) -> list[str]:
    """A line for each, or for what hinders to know them."""
    try:
        entries = _entries(session)
    except BaselineError as error:
        return [str(error)]
    unused = _unused(session, entries)
    copies = [f"stray copy: {one.path} ({one.copy_of} is what counts); delete it" for one in entries if one.copy_of]
    what = "delete the file" if session.settings.static else "remove it with --update-baselines=prune"
    if session.settings.update == "prune":
        if not session.coverage.doubts():
            return copies  # they were removed, or named as what would be
        what = "delete the file"
    why = f"no case of this run has its settings; if they are gone, {what}"
    return [*copies, *(f"unused baseline: {path} ({why})" for path in unused)]


def prune(session: PerfSession) -> str:
    """Remove them; why that did not go well, where it did not."""
    try:
        unused = _unused(session, _entries(session))
        doubts = session.coverage.doubts()
        if doubts:
            return f"--update-baselines=prune: nothing was removed, {doubts}"
        if not unused:
            session.notes.append("--update-baselines=prune: nothing to remove, every baseline is in use")
        elif session.settings.dry_run:
            session.notes += [f"--update-baselines=prune would remove: {path}" for path in unused]
        else:
            for path in unused:
                path.unlink()
                session.notes.append(f"removed baseline: {path}")
    except (BaselineError, OSError) as error:
        return f"--update-baselines=prune: {error}"
    return ""
