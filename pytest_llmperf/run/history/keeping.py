"""What a run that is over adds to its history. A store that fails fails no run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_llmperf.report.run_document import RunDocument
from pytest_llmperf.report.text import one_line
from pytest_llmperf.run.history.history_error import HistoryError
from pytest_llmperf.run.history.past_results import past_results


def keep(path: Path, document: Mapping[str, Any]) -> str:
    """Add what ``document``, as ``--perf-json`` has it, tells to the store at ``path``; a line where that failed."""
    try:
        results = past_results(RunDocument(document), "this run")
        if not results:
            return ""
        # Who launches nothing pays for no database.
        from pytest_llmperf.run.history.history_store import HistoryStore  # noqa: PLC0415

        try:
            HistoryStore(path).append(results)
        except HistoryError as error:
            return f"--perf-history {error}; this run is not in it"
    except Exception as error:  # noqa: BLE001 - whatever it is, the run has been judged
        return f"--perf-history {path}: this run is not in it ({one_line(f'{type(error).__name__}: {error}')})"
    return ""
