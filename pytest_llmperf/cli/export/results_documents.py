"""The ``--perf-json`` files that somebody named, whoever wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.merge.results_checks import check


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
    try:
        values: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except UnicodeDecodeError:
        raise ValueError("no UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"no JSON, perhaps cut off ({error})") from None
    check(values)
    return values
