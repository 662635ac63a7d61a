"""Leftovers: baselines that a run leaves without a test that asks for them, and those that it put in others' place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

from pytest_llmperf.judge.acceptance import replaced, replaced_line
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.judge.static_steps import entries_of_run
from pytest_llmperf.judge.store import BaselineError, Document
from pytest_llmperf.records.results_document import ResultsDocument
from pytest_llmperf.run.findings import ALL, STOPPED, Coverage, file_of, is_whole
from pytest_llmperf.run.run import Run
from pytest_llmperf.settings.spec import read_spec


def unused_baselines(
    entries: Mapping[Path, Document], digests: AbstractSet[str], coverage: Coverage, root: Path
) -> list[Path]:
    """Baselines whose digest no test asked for, though the file that recorded them ran in full. Those of other test
    files are left alone; where the file is gone, only the whole suite knows whether its tests moved."""
    files, whole = coverage.files(), not coverage.doubts()

    def is_unused(entry: Document) -> bool:
        file = file_of(entry.recorded_by)
        is_known = file in files or (whole and not (root / file).exists())
        return is_known and entry.digest not in digests and coverage.said.get(entry.recorded_by) != STOPPED

    return sorted(path for path, entry in entries.items() if is_unused(entry))


def _entries(run: Run) -> dict[Path, Document]:
    is_static = run.settings.static  # what it judges is of no machine kind, and of all
    machine = "" if is_static else run.machine_kind
    return entries_of_run(run.settings.baselines, machine, on_cpu=run.on_cpu, is_static=is_static)


def seen(run: Run, entries: Mapping[Path, Document] | None = None) -> Coverage:
    """What this run saw, and what its options may have hidden from it; ``entries`` are of its baselines."""
    try:
        known = _entries(run) if entries is None else entries
    except BaselineError:  # nobody knows which tests recorded them
        known = {}
    run.note_selection([file_of(entry.recorded_by) for entry in known.values()])
    return run.coverage


def listed(run: Run) -> list[str]:
    """A line for each, or for what hinders to know them."""
    try:
        entries = _entries(run)
    except BaselineError as error:
        return [str(error)]
    unused = unused_baselines(entries, set(run.findings.digests), seen(run, entries), run.rootdir)
    why = "no case of this run has its settings; if they are gone, delete the file"
    return [f"unused baseline: {path} ({why})" for path in unused]


def unused_of_night(documents: Sequence[ResultsDocument]) -> tuple[list[str], list[str]]:
    """A line for each baseline that no test of a whole night asks for, and why some may not be known."""
    suites = [document.suite for document in documents if document.suite]
    if not suites or len(suites) < len(documents):
        return [], []
    plans = [document for document in documents if document.suite and document.suite.perf_width is None]
    if not plans or not all(map(is_whole, plans)):
        return [], ["no unused baseline can be known: no plan has asked every test"]
    whole, digests = Coverage(), set[str]()
    for suite in suites:
        whole.add(vars(suite.coverage))
        digests |= set(suite.digests)
    on_cpu = not any(document.machine.gpus for document in documents)
    machines = [document.machine for document in documents]
    places = {(s.baselines, s.rootdir, machine.kind) for s, machine in zip(suites, machines, strict=True)}
    lines: list[str] = []
    for baselines, root, kind in sorted(places):
        try:
            entries = entries_of_run(Path(baselines), kind, on_cpu=on_cpu) if kind else {}
        except BaselineError as error:
            lines.append(str(error))
            continue
        lines += [
            f"unused baseline: {path} (no case of any width has its settings; if they are gone, delete the file)"
            for path in unused_baselines(entries, digests, whole, Path(root))
        ]
        for gap in sorted(whole.gaps):  # for want of a package, say
            file, _, how = gap.partition(": collection ")
            stored = sum(file_of(entry.recorded_by) == file for entry in entries.values())
            if how and stored:
                lines.append(f"{file}: its tests were not collected ({how}), and {stored} baseline(s) are of them")
    doubts = whole.doubts()
    lines = list(dict.fromkeys(lines))  # what is of no machine kind is found with each
    return lines, [f"not every unused baseline may be known: {doubts}"] if doubts else []


def unexplained(run: Run) -> list[str]:
    """A line for each former case of a test that was replaced without a reason; its new baseline is taken back. With a
    reason, what was replaced is kept, so that nobody is asked again; a line for each where that fails."""
    settings, findings = run.settings, run.findings
    first = [one for one in findings.results if one.updated and one.verdict == "new" and one.launches]
    if settings.static or not first:
        return []
    store = run.store
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
