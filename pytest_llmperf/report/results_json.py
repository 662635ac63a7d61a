"""``--perf-json``: every result of a run, for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pytest_llmperf.records.result import CaseResult, Check, Spent
from pytest_llmperf.records.results_document import SCHEMA, Figure, Result, SpentTime
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.redaction import redacted, without_secrets


def document(machine: Mapping[str, Any], results: Sequence[CaseResult], spent: Spent | None = None) -> dict[str, Any]:
    """Results as ``--perf-json`` has them: plain data that strict JSON can hold; NaN and infinities are null."""
    values = {"schema": SCHEMA, "machine": machine, "results": [codec.plain(result_of(result)) for result in results]}
    if spent is not None and spent.launches:
        phases = {name: round(seconds, 3) for name, seconds in spent.phases.items()}
        values["spent"] = codec.plain(
            SpentTime(launches=spent.launches, seconds=round(spent.seconds, 3), phases=phases)
        )
    plain: dict[str, Any] = _plain(values)
    return plain


def result_of(result: CaseResult) -> Result:
    """A case as a document has it."""
    metrics = {}
    for check in result.checks:
        metrics[check.metric] = Figure(
            **_shared(Figure, check),
            interval=None if check.low is None or check.high is None else (check.low, check.high),
            verdict=check.verdict if check.verdict and check.verdict != result.verdict else "",
            times_slower=check.times_slower,
        )
    return Result(**_shared(Result, result), verdict=result.verdict, metrics=metrics)


def _shared(kind: type[Figure | Result], record: Check | CaseResult) -> dict[str, Any]:
    """The fields of ``record`` that a ``kind`` has too; a figure's verdict is another."""
    own = vars(record)
    return {name: own[name] for name in (each.name for each in fields(kind)) if name in own and name != "verdict"}


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: evidence is whatever a worker found, and a reader must not trip over NaN."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    return str(value)


def _leaving(value: Any, name: str = "") -> Any:
    """``value`` as it may leave; JSON itself escapes what a terminal would obey."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return (
            redacted(value)
            if name == "variables"
            else {_leaving(key): _leaving(item, key) for key, item in value.items()}
        )
    return [_leaving(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document``, without secrets, so that ``path`` always holds a whole one, the old or the new.

    Raises:
        OSError: the file or its folder cannot be written; whatever was there before is still there.
    """
    write_text(path, json.dumps(_leaving(document), indent=1, allow_nan=False) + "\n")
