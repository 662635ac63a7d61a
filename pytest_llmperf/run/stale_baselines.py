"""Stale baselines: those that no case of this run uses, listed or removed, and those of a test's former cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmperf.judge.acceptance import replaced, replaced_line
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.store import BaselineStore, Entry, entries_of_run
from pytest_llmperf.run.coverage import ALL, Coverage, file_of, unused_baselines
from pytest_llmperf.settings.spec import read_spec

if TYPE_CHECKING:
    from pytest_llmperf.run.run import Run


def _entries(run: Run) -> list[Entry]:
    # What a run without launches judges is of no machine kind, and of all.
    machine, is_static = "" if run.settings.static else run.machine_kind, run.settings.static
    return entries_of_run(run.settings.baselines, machine, on_cpu=run.on_cpu, is_static=is_static)


def _unused(run: Run, entries: Sequence[Entry]) -> list[Path]:
    """Baselines that no case of this run has; none where not every case was asked."""
    return unused_baselines(entries, set(run.findings.digests), seen(run, entries), run.rootdir)


def seen(run: Run, entries: Sequence[Entry] | None = None) -> Coverage:
    """Return what this run saw, and what its options may have hidden from it; ``entries`` are of its baselines.

    Where these cannot be read, nobody knows which tests recorded them.
    """
    try:
        known = _entries(run) if entries is None else entries
    except BaselineError:
        known = []
    run.note_selection([file_of(entry.recorded_by) for entry in known])
    return run.coverage


def listed(run: Run) -> list[str]:
    """A line for each, or for what hinders to know them."""
    try:
        entries = _entries(run)
    except BaselineError as error:
        return [str(error)]
    unused = _unused(run, entries)
    copies = [f"stray copy: {one.path} ({one.copy_of} is what counts); delete it" for one in entries if one.copy_of]
    is_pruned = run.settings.update == "prune"
    if is_pruned and not run.coverage.doubts():
        return copies  # they were removed, or named as what would be
    what = "delete the file" if run.settings.static or is_pruned else "remove it with --update-baselines=prune"
    why = f"no case of this run has its settings; if they are gone, {what}"
    return [*copies, *(f"unused baseline: {path} ({why})" for path in unused)]


def prune(run: Run) -> str:
    """Remove them; why that did not go well, where it did not."""
    try:
        unused = _unused(run, _entries(run))
        doubts = run.coverage.doubts()
        if doubts:
            return f"--update-baselines=prune: nothing was removed, {doubts}"
        if not unused:
            run.notes.append("--update-baselines=prune: nothing to remove, every baseline is in use")
        for path in unused:
            if not run.settings.dry_run:
                path.unlink()
            said = "--update-baselines=prune would remove" if run.settings.dry_run else "removed baseline"
            run.notes.append(f"{said}: {path}")
    except (BaselineError, OSError) as error:
        return f"--update-baselines=prune: {error}"
    return ""


def unexplained(run: Run) -> list[str]:
    """A line for each former case of a test that was replaced without a reason; its new baseline is taken back.

    Only the end of a run knows which cases its tests still have. With a reason, what was replaced is kept, so that
    nobody is asked again; a line for each where that fails.
    """
    settings, findings = run.settings, run.findings
    first = [one for one in findings.results if one.updated and one.verdict == "new" and one.launches]
    if settings.static or not first:
        return []
    store = BaselineStore(settings.baselines)
    stored = store.baselines(run.machine_kind)
    whole = {node for node, said in run.coverage.said.items() if said == ALL}
    found = list(replaced(first, stored, set(findings.digests), whole, run.collected))
    gone = {result.digest: sorted(one.digest for one in formers) for result, formers in found}
    own = [one for one in stored if one.digest in gone]
    if settings.reason:
        return [line for one in own if (line := _explained(store, one, gone[one.digest]))]
    for one in own:
        store.path(one.machine, read_spec(one.spec)).unlink(missing_ok=True)
    findings.results = [replace(one, updated="") if one.digest in gone else one for one in findings.results]
    return list(dict.fromkeys(replaced_line(result, formers[0]) for result, formers in found))


def _explained(store: BaselineStore, baseline: Baseline, gone: Sequence[str]) -> str:
    def change(now: Baseline | None) -> Baseline:
        now = now or baseline
        anchor = replace(now.anchor, replaces=tuple(gone))
        return replace(now, anchor=anchor, history=(anchor, *now.history[1:]))

    try:
        store.update(baseline.machine, read_spec(baseline.spec), change)
    except BaselineError as error:
        return str(error)
    return ""
