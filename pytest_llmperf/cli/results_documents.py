"""The ``--perf-json`` files that somebody named, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.night.results_file import check
from pytest_llmperf.support.lenient_json import read_lenient


def read_documents(paths: Sequence[Path]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The documents, and a line for each file that is none: the others are told without it."""
    found, troubles = list[Mapping[str, Any]](), list[str]()
    for path in paths:
        try:
            found.append(_read(path))
        except OSError as error:
            troubles.append(f"{path}: {error.strerror or error}; expected a file of --perf-json")
        except ValueError as error:
            troubles.append(f"{path}: {error}; expected a file that --perf-json wrote")
    return found, troubles


def _read(path: Path) -> Mapping[str, Any]:
    """What is no finite number, as old files have it, is absent.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such document, in a line.
    """
    values: Mapping[str, Any] = read_lenient(path)
    check(values)
    return values
