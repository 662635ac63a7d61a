"""RunDocument: a ``--perf-json`` document as a page reads it, whoever wrote it and when. Pure.

What is absent, of the wrong kind or no number is left out; only what is no such document at all is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.report.summary_table import without_name
from pytest_llmperf.report.text import one_line

SCHEMA = 1

Values = Mapping[str, Any]


def text(value: object) -> str:
    """On one line; empty where it is no text."""
    return " ".join(one_line(value).split()) if isinstance(value, str) else ""


# No figure of ours is near it, and products and ratios of such are numbers.
_MOST = 2.0**63


def number(value: object) -> float | None:
    """Where it is one that can be computed with; next to nothing is nothing."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST < value < _MOST:
        return None
    return float(value) if abs(value) > 1 / _MOST else 0.0


def mapping(value: object) -> Values:
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def lines(value: object) -> tuple[str, ...]:
    """Those of a list that are text."""
    return tuple(filter(None, map(text, items(value))))


@dataclass(frozen=True)
class Figure:
    """A metric of a result."""

    metric: str
    value: float | None
    unit: str = "1"
    baseline: float | None = None
    limit: float | None = None
    change: float | None = None
    detectable: float | None = None
    interval: tuple[float, float] | None = None
    detail: str = ""
    verdict: str = ""
    """Its own, where it is not the case's; empty in old files."""
    times_slower: float | None = None
    """How many times slower still passes, where speed is hardly gated, as on a CPU."""

    @classmethod
    def of(cls, metric: str, values: Values) -> Figure:
        ends = [number(end) for end in items(values.get("interval"))]
        names = ("value", "baseline", "limit", "change", "detectable", "times_slower")
        plain = {name: number(values.get(name)) for name in names}
        low, high = ends if len(ends) == 2 else (None, None)  # noqa: PLR2004 - an interval has two ends
        return cls(
            metric=metric,
            unit=text(values.get("unit")) or "1",
            interval=None if low is None or high is None else (low, high),
            detail=text(values.get("detail")),
            verdict=text(values.get("verdict")),
            **plain,
        )


@dataclass(frozen=True)
class Result:
    """A case."""

    values: Values
    machine: str
    source: str
    """Of which file it is; empty where there is one."""

    def text(self, name: str) -> str:
        return text(self.values.get(name))

    @property
    def id(self) -> str:
        return self.text("id") or self.text("nodeid") or "a case without a name"

    @property
    def verdict(self) -> str:
        return self.text("verdict") or "unknown"

    @cached_property
    def figures(self) -> Mapping[str, Figure]:
        found = mapping(self.values.get("metrics"))
        return {str(name): Figure.of(str(name), mapping(values)) for name, values in found.items()}

    def figure(self, metric: str) -> Figure:
        """One without a value where the case has none."""
        return self.figures.get(metric, Figure(metric, None))

    def lines(self, name: str) -> tuple[str, ...]:
        return lines(self.values.get(name))

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Those of its records that this version can read."""
        return _launches(self.values.get("launches"))

    @cached_property
    def launches_before(self) -> tuple[Launch, ...]:
        """Of the other side, where two took turns."""
        return _launches(self.values.get("launches_before"))

    @property
    def num_launches(self) -> int:
        """Whether they can be read or not."""
        return len(items(self.values.get("launches")))

    @property
    def num_unread(self) -> int:
        """How many of its launches no longer are, or not yet, what this version reads."""
        return self.num_launches - len(self.launches)

    @property
    def published_rate(self) -> float | None:
        """Tokens/s per GPU."""
        return number(mapping(self.values.get("reference")).get("tokens_per_second_per_gpu"))

    @property
    def published_bytes(self) -> float | None:
        return number(mapping(self.values.get("reference")).get("peak_reserved_bytes"))


def _launches(values: object) -> tuple[Launch, ...]:
    found = []
    for record in items(values):
        try:
            # A loss that is none is null in JSON, and such a launch is what an invalid case is about.
            losses = [math.nan if loss is None else loss for loss in items(mapping(record).get("losses"))]
            launch = Launch.from_dict({**record, "losses": losses})
            _ = launch.median_step_seconds
            if not all(map(math.isfinite, (*launch.step_seconds, *launch.phases.values()))):
                raise ValueError("a time that is none")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue
        found.append(launch)
    return tuple(found)


@dataclass(frozen=True)
class RunDocument:
    """One run."""

    values: Values
    source: str = ""
    """Its file's name, where several are told of."""

    @property
    def machine(self) -> str:
        """Its kind; of a night of several files that of all of them, where they have one."""
        parts = mapping(self.values.get("machines")).values()
        several = {text(mapping(each).get("kind")) for each in parts}
        own = text(mapping(self.values.get("machine")).get("kind"))
        return own or (several.pop() if len(several) == 1 else "") or "unknown machine"

    @property
    def is_on_gpus(self) -> bool:
        return bool(self.gpus)

    @property
    def gpus(self) -> tuple[str, ...]:
        parts = [self.values.get("machine"), *mapping(self.values.get("machines")).values()]
        found = max((items(mapping(part).get("gpus")) for part in parts), key=len)
        return tuple(text(mapping(gpu).get("name")) or "GPU" for gpu in found)

    @cached_property
    def results(self) -> tuple[Result, ...]:
        found = items(self.values.get("results"))
        return tuple(Result(each, self.machine, self.source) for each in found if isinstance(each, Mapping))

    @property
    def spent(self) -> Mapping[str, float]:
        """Seconds by phase."""
        phases = mapping(mapping(self.values.get("spent")).get("phases"))
        return {str(name): seconds for name, value in phases.items() if (seconds := number(value))}

    @property
    def num_launches(self) -> int:
        told = number(mapping(self.values.get("spent")).get("launches"))
        return sum(one.num_launches for one in self.results) if told is None else int(told)

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        found = map(mapping, items(self.values.get("skipped")))
        told = ((text(each.get("id")), text(each.get("reason"))) for each in found)
        return tuple((name, without_name(name, why)) for name, why in told)

    @property
    def commit(self) -> str:
        """With what was changed in the tree; empty outside of version control."""
        revision = mapping(self.values.get("revision"))
        changed = number(revision.get("changed"))
        return text(revision.get("commit")) + (f" + {changed:g} changed" if changed else "")

    @property
    def versions(self) -> Mapping[str, str]:
        """Of a run that launched nothing."""
        return {str(name): text(value) for name, value in mapping(self.values.get("versions")).items()}

    @property
    def schema(self) -> object:
        return self.values.get("schema")


def refused(values: object) -> str:
    """Why this is no document of which a page can be made; empty where it is one."""
    if not isinstance(values, Mapping) or not isinstance(values.get("results"), (list, tuple)):
        return "no file of --perf-json; expected one with results"
    schema = values.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        return f"schema {schema} is newer than this version understands ({SCHEMA}); upgrade pytest-llmperf"
    return ""
