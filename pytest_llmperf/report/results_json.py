"""``--perf-json``: every result of a run as it is written for programs, and as it is read again, whoever wrote it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Check, Spent
from pytest_llmperf.records.results_document import SCHEMA, Figure, SpentTime, document_of, launch_of
from pytest_llmperf.records.results_document import Result as StoredResult
from pytest_llmperf.report.text import one_line
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


def result_of(result: CaseResult) -> StoredResult:
    """A case as a document has it."""
    metrics = {}
    for check in result.checks:
        metrics[check.metric] = Figure(
            **_shared(Figure, check),
            interval=None if check.low is None or check.high is None else (check.low, check.high),
            verdict=check.verdict if check.verdict and check.verdict != result.verdict else "",
            times_slower=check.times_slower,
        )
    return StoredResult(**_shared(StoredResult, result), verdict=result.verdict, metrics=metrics)


def _shared(kind: type[Figure | StoredResult], record: Check | CaseResult) -> dict[str, Any]:
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


# Read leniently: what is absent, of the wrong kind or no number is left out, and texts are one line each.

# No figure of ours is near it, and products and ratios of such are numbers.
_MOST = 2.0**63

# Raw records, and a text of several lines.
_AS_THEY_ARE = ("launches", "launches_before", "updated")


def _shown(value: Any, name: str = "") -> Any:
    """``value`` with texts of one line, and numbers that can be computed with: next to nothing is nothing."""
    if name in _AS_THEY_ARE:
        return value
    if isinstance(value, str):
        return " ".join(one_line(value).split())
    if isinstance(value, Mapping):
        return {_shown(name): _shown(item, name) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    number = value if -_MOST < value < _MOST else None
    return number if number is None or abs(number) > 1 / _MOST else 0


@dataclass(frozen=True)
class Result:
    """A case."""

    record: StoredResult
    machine: str
    source: str
    """Of which file it is; empty where there is one."""

    @property
    def id(self) -> str:
        return self.record.id or self.record.nodeid or "a case without a name"

    @property
    def verdict(self) -> str:
        return self.record.verdict or "unknown"

    def figure(self, metric: str) -> Figure:
        return self.record.figure(metric)

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Those of its records that this version can read."""
        return _launches(self.record.launches)

    @cached_property
    def launches_before(self) -> tuple[Launch, ...]:
        """Those of the other side, where two took turns."""
        return _launches(self.record.launches_before)

    @property
    def num_unread(self) -> int:
        """How many of its launches no longer are, or not yet, what this version reads."""
        return len(self.record.launches) - len(self.launches)


def _launches(records: Sequence[Any]) -> tuple[Launch, ...]:
    found = []
    for record in records:
        try:
            launch = launch_of(record)
            _ = launch.median_step_seconds
            if not all(map(math.isfinite, (*launch.step_seconds, *launch.phases.values()))):
                raise ValueError("a time that is none")
        except (ArithmeticError, ValueError):
            continue
        found.append(launch)
    return tuple(found)


class RunDocument:
    """One run."""

    def __init__(self, values: Mapping[str, Any], source: str = "") -> None:
        """``source``: its file's name, where several are told of."""
        self.record, self.source = document_of(_shown(values)), source
        self.schema = values.get("schema")

    @property
    def machine(self) -> str:
        """Its kind; of a night of several files that of all of them, where they have one."""
        return self.record.machine.kind or self.record.kind or "unknown machine"

    @property
    def name(self) -> str:
        return self.source or self.machine

    @property
    def gpus(self) -> tuple[str, ...]:
        found = max((machine.gpus for machine in (self.record.machine, *self.record.machines.values())), key=len)
        return tuple(gpu.name or "GPU" for gpu in found)

    @cached_property
    def results(self) -> tuple[Result, ...]:
        return tuple(Result(each, self.machine, self.source) for each in self.record.results)

    @property
    def spent(self) -> Mapping[str, float]:
        """Seconds by phase."""
        phases = self.record.spent.phases if self.record.spent else {}
        return {name: seconds for name, seconds in phases.items() if seconds}

    @property
    def num_launches(self) -> int:
        return (
            self.record.spent.launches if self.record.spent else sum(len(one.record.launches) for one in self.results)
        )
