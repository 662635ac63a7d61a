"""``--perf-json``: results as they are written, as they are read again, whoever wrote them, and for other tools."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Check, Spent
from pytest_llmperf.records.results_document import (
    SCHEMA,
    TEST,
    Figure,
    ResultsDocument,
    SpentTime,
    document_of,
    launch_of,
)
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
        told = SpentTime(launches=spent.launches, seconds=round(spent.seconds, 3), phases=phases)
        values["spent"] = codec.plain(told)
    return dict(_mapped(values, _for_json))


def result_of(result: CaseResult) -> StoredResult:
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


def _mapped(value: Any, leaf: Callable[[Any], Any], raw: Container[str] = (), name: str = "") -> Any:
    """``value`` with its keys and all that is no list and no object as ``leaf`` makes it; what is ``raw`` stays."""
    if isinstance(value, Mapping):
        return {str(leaf(key)): _mapped(item, leaf, raw, key) for key, item in value.items()}
    if name in raw:
        return value
    return [_mapped(item, leaf, raw) for item in value] if isinstance(value, (list, tuple)) else leaf(value)


def _for_json(value: Any) -> Any:
    """What JSON can hold: evidence is whatever a worker found, and a reader must not trip over NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def _leaving(value: Any, name: str = "") -> Any:
    """``value`` as it may leave; JSON itself escapes what a terminal would obey."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        is_of_a_host = name == "variables"
        return redacted(value) if is_of_a_host else {_leaving(key): _leaving(one, key) for key, one in value.items()}
    return [_leaving(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document``, without secrets, so that ``path`` always holds a whole one, or an OSError and the old one."""
    write_text(path, json.dumps(_leaving(document), indent=1, allow_nan=False) + "\n")


# Read leniently: what is absent, of the wrong kind or no number is left out, and texts are one line each.

# No figure of ours is near it, and products and ratios of such are numbers.
_MOST = 2.0**100

_Stored = TypeVar("_Stored", StoredResult, ResultsDocument)
_RAW = ("launches", "launches_before")


def _readable(value: Any) -> Any:
    """Texts of one line, and numbers that can be computed with: next to nothing is nothing."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    number = value if -_MOST < value < _MOST else None
    return number if number is None or abs(number) > 1 / _MOST else 0


def shown(record: _Stored) -> _Stored:
    """``record`` as other tools get it."""
    return codec.read_lenient(type(record), _mapped(codec.plain(record), _readable, _RAW)) or record


@dataclass(frozen=True)
class Result:
    record: StoredResult
    machine: str

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
    def __init__(self, values: Mapping[str, Any], source: str = "") -> None:
        """``source``: its file's name, where several are told of."""
        self.source = source
        self.record = document_of(_mapped(values, _readable, (*_RAW, "updated")))  # which has several lines
        self.schema = values.get("schema")

    @property
    def machine(self) -> str:
        """Its kind; of a night of several files that of all of them, where they have one."""
        return self.record.machine.kind or self.record.kind or "unknown machine"

    @property
    def gpus(self) -> tuple[str, ...]:
        found = max((machine.gpus for machine in (self.record.machine, *self.record.machines.values())), key=len)
        return tuple(gpu.name or "GPU" for gpu in found)

    @cached_property
    def results(self) -> tuple[Result, ...]:
        return tuple(Result(each, self.machine) for each in self.record.results)

    def rerun(self, nodeid: str) -> list[str]:
        """The words that run a test again; none where it does not say."""
        words = self.record.rerun
        return [word.replace(TEST, nodeid) for word in words] if any(TEST in word for word in words) else []
