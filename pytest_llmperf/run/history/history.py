"""History: the results that a store or ``--perf-json`` files hold, whichever were named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_llmperf.records.past_result import PastResult
from pytest_llmperf.records.results_document import NoResultsError, ResultsError, read_values
from pytest_llmperf.report.run_document import RunDocument
from pytest_llmperf.run.history.history_error import HistoryError
from pytest_llmperf.run.history.past_results import past_results

_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True)
class History:
    """In the order of time, each measurement once."""

    results: tuple[PastResult, ...]
    troubles: tuple[str, ...] = ()
    """A line for each file that cannot serve."""

    @classmethod
    def read(cls, paths: Sequence[Path]) -> History:
        """Of stores, of ``--perf-json`` files, and of folders in which there are some of either."""
        found, troubles = list[PastResult](), list[str]()
        for path in paths:
            for file in _files(path):
                try:
                    found += _read(file)
                except (HistoryError, ResultsError) as error:
                    # Of a folder everything is looked at, and much of it is something else.
                    if file == path or not isinstance(error, NoResultsError):
                        troubles.append(str(error))
                except OSError as error:
                    troubles.append(f"{file}: {error.strerror or error}; expected a store or a file of --perf-json")
        return cls.of(found, troubles)

    @classmethod
    def of(cls, results: Iterable[PastResult], troubles: Sequence[str] = ()) -> History:
        """Of ``results`` in any order; a night's files and what ``llmperf merge`` made of them may lie side by side."""
        found: dict[tuple[object, ...], PastResult] = {}
        for result in results:
            known = found.get(result.measurement)
            # What was merged does not say of which revision each part of it is.
            if known is None or not known.revision:
                found[result.measurement] = result
        return cls(tuple(sorted(found.values(), key=lambda result: (result.began, result.run))), tuple(troubles))


def of_project(results: Sequence[PastResult], project: str) -> Sequence[PastResult]:
    """Those of ``project``, with the older ones that do not say; all of them, told apart, where it has none."""
    own = [replace(result, project="") for result in results if result.project in ("", project)]
    return own or results


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".json", ".sqlite") and file.is_file())


def _read(path: Path) -> list[PastResult]:
    with path.open("rb") as file:
        is_store = file.read(len(_SQLITE)) == _SQLITE
    if is_store or path.suffix == ".sqlite":
        # Pages and --perf-json files do without it.
        from pytest_llmperf.run.history.history_store import HistoryStore  # noqa: PLC0415

        return HistoryStore(path).read()
    return past_results(RunDocument(read_values(path)), str(path))
