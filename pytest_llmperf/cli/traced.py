"""Traced: a trace that somebody names, by a stored case or in a file of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.cli.answer import CaseError
from pytest_llmperf.cli.baseline_folder import find
from pytest_llmperf.records.results_document import (
    Result,
    ResultsError,
    document_of,
    launch_of,
    read_values,
)
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.support.suggestions import hint


@dataclass(frozen=True)
class Traced:
    """And whose it is."""

    case: str
    name: str
    """Of the case, and where it is of."""
    trace: Trace
    versions: Mapping[str, str]


def traced(word: str, baselines: Path, machine: str | None) -> Traced:
    """The trace of a stored case, or of ``RESULTS.json`` (its only case) or ``RESULTS.json:ID``.

    Raises:
        BaselineError: the case's file cannot serve.
        CaseError: no such case or file, or it has no trace; one line.
    """
    path, _, name = word.partition(".json:")
    if name:
        return _of_results(Path(f"{path}.json"), name)
    if word.endswith(".json") and _is_results(Path(word)):
        return _of_results(Path(word), "")
    if word.endswith(".json") and not Path(word).exists():
        raise CaseError(f"{word}: no such file; expected one of --perf-json, or a baseline's")
    stored = find(word, baselines, machine)
    kept = stored.baseline.trace
    if kept is None:
        raise CaseError(
            f"{stored.path}: no launch that was recorded had a trace; record the case once more with --update-baselines"
        )
    return Traced(stored.baseline.id, stored.baseline.id, kept.trace, kept.versions)


def _is_results(path: Path) -> bool:
    try:
        return '"results"' in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # the case's own search says what is wrong with it


def _of_results(path: Path, name: str) -> Traced:
    try:
        results = document_of(read_values(path)).results
    except ResultsError as error:
        raise CaseError(str(error)) from error
    ids = [result.id for result in results]
    if not name and len(ids) != 1:
        raise CaseError(f"{path}: it has {len(ids)} cases, name one: {path}:{ids[0] if ids else 'ID'}")
    found = [result for result in results if result.id == (name or ids[0])]
    if not found:
        raise CaseError(f"{path}: no case {name}{hint(name, ids)}")
    return _newest(path, found[-1])


def _newest(path: Path, result: Result) -> Traced:
    name = result.id
    try:
        launches = [launch_of(record) for record in result.launches]
    except ValueError as error:
        raise CaseError(f"{path}: the launches of {name} cannot be read ({error})") from error
    for launch in reversed(launches):
        if launch.trace:
            return Traced(name, f"{name} of {path.name}", launch.trace, launch.environment.versions)
    why = launches[-1].trace.none if launches else "it was not launched"
    raise CaseError(f"{path}: {name} has no trace ({why})")
