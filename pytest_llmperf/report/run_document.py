"""RunDocument: a results document as it is shown and kept, whoever wrote it and when. Pure.

It is read leniently: what is absent, of the wrong kind or no number is left out. Its texts are one line each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.results_document import Figure, document_of, launch_of
from pytest_llmperf.records.results_document import Result as StoredResult
from pytest_llmperf.report.text import one_line

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
