"""``--perf-json``: every result of a run, for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytest_llmperf.records.result import CaseResult, Check, Spent
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.redaction import redacted, without_secrets

SCHEMA = 1

#: Where ``rerun``, the words that run a test again as it was run, have its node id.
TEST = "{test}"


def document(machine: Mapping[str, Any], results: Sequence[CaseResult], spent: Spent | None = None) -> dict[str, Any]:
    """What ``--perf-json`` writes: plain data that strict JSON can hold; NaN and infinities are null.

    ``launches_before`` (the first side's, where two took turns), ``rung``, ``reference``, ``changed``, ``differences``,
    ``notes``, ``diagnosis`` (what traces point to), ``loss_curve`` (its parts beside what is stored), ``updated``,
    ``shares`` (the test whose launches these are too) and ``shared_launches`` (how many of them, the first ones, that
    or another test tells of too) are there only where a case has them; so are a metric's ``detail``, its ``interval``,
    in which its change is nine times in ten, and ``times_slower``, where a multiple passes. ``spent`` is there where
    something was launched: all launches together, also those of no result.
    """
    values = {"schema": SCHEMA, "machine": machine, "results": [_result(result) for result in results]}
    if spent is not None and spent.launches:
        phases = {name: round(seconds, 3) for name, seconds in spent.phases.items()}
        values["spent"] = {"launches": spent.launches, "seconds": round(spent.seconds, 3), "phases": phases}
    plain: dict[str, Any] = _plain(values)
    return plain


def _result(result: CaseResult) -> dict[str, Any]:
    values: dict[str, Any] = {
        "id": result.id,
        "digest": result.digest,
        "nodeid": result.nodeid,
        "verdict": result.verdict,
        "reason": result.reason,
        "metrics": {check.metric: _metric(check, result.verdict) for check in result.checks},
        "launches": [launch.to_dict() for launch in result.launches],
    }
    extras = {
        "launches_before": [launch.to_dict() for launch in result.launches_before],
        "rung": result.rung,
        "reference": asdict(result.reference) if result.reference else None,
        "changed": result.changed,
        "differences": result.differences,
        "notes": result.notes,
        "diagnosis": result.diagnosis,
        "loss_curve": result.loss_curve.to_dict() if result.loss_curve else None,
        "updated": result.updated,
        "shares": result.shares,
        "shared_launches": result.shared_launches,
    }
    return {**values, **{name: extra for name, extra in extras.items() if extra}}


def _metric(check: Check, verdict: str) -> dict[str, Any]:
    return {
        "value": check.value,
        "unit": check.unit,
        "baseline": check.baseline,
        "limit": check.limit,
        "change": check.change,
        "detectable": check.detectable,
        **({} if check.low is None or check.high is None else {"interval": [check.low, check.high]}),
        **({"verdict": check.verdict} if check.verdict and check.verdict != verdict else {}),
        **({"detail": check.detail} if check.detail else {}),
        **({"times_slower": check.times_slower} if check.is_wide else {}),
    }


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
