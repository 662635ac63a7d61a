"""Baselines that no test of a whole night asks for: each width alone saw only its own tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.curves.curve_store import CurveStore
from pytest_llmperf.judge.static.step_store import StepStore
from pytest_llmperf.judge.store import BaselineStore, Entry
from pytest_llmperf.run.coverage import Coverage, file_of, is_whole, unused_baselines


def unused(documents: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """A line for each, of all the files of one night together; and why some may not be known.

    Nobody knows where a file says nothing of its suite, being of an older version, or where no plan asked every test:
    a width alone has seen its own.
    """
    suites = [document["suite"] for document in documents if "suite" in document]
    if not suites or len(suites) < len(documents):
        return [], []
    plans = [document for document in documents if document["suite"].get("perf_width") is None]
    if not plans or not all(map(is_whole, plans)):
        return [], ["no unused baseline can be known: no plan has asked every test"]
    whole, digests = Coverage(), set[str]()
    for suite in suites:
        whole.add(suite["coverage"])
        digests |= set(suite["digests"])
    places = {
        (suite["baselines"], suite["rootdir"], document["machine"].get("kind", ""))
        for document, suite in zip(documents, suites, strict=True)
    }
    on_cpu = not any(document["machine"].get("gpus") for document in documents)
    lines: list[str] = []
    for baselines, root, kind in sorted(places):
        try:
            entries = _entries(Path(baselines), kind, on_cpu=on_cpu)
        except BaselineError as error:
            lines.append(str(error))
            continue
        lines += [
            f"unused baseline: {path} (no case of any width has its settings; if they are gone, remove it with "
            "--update-baselines=prune)"
            for path in unused_baselines(entries, digests, whole, Path(root))
        ]
        lines += _not_collected(entries, whole)
    doubts = whole.doubts()
    lines = list(dict.fromkeys(lines))  # what is of no machine kind is found with each
    return lines, [f"not every unused baseline may be known: {doubts}"] if doubts else []


def _entries(root: Path, kind: str, *, on_cpu: bool) -> list[Entry]:
    """Those of the machine kind, and those of none that cases for the CPU or for GPUs recorded."""
    if not kind:
        return []
    return [
        *BaselineStore(root).entries(kind),
        *StepStore(root).entries(on_cpu=on_cpu),
        *CurveStore(root).entries(on_cpu=on_cpu),
    ]


def _not_collected(entries: Sequence[Entry], whole: Coverage) -> list[str]:
    """A line for each file with baselines of which pytest collected no test, for want of a package say."""
    lines = []
    for gap in sorted(whole.gaps):
        file, _, how = gap.partition(": collection ")
        stored = sum(file_of(entry.recorded_by) == file for entry in entries)
        if how and stored:
            lines.append(f"{file}: its tests were not collected ({how}), and {stored} baseline(s) are of them")
    return lines


def is_strict(documents: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an unused baseline is red."""
    return any(document.get("suite", {}).get("strict") for document in documents)
