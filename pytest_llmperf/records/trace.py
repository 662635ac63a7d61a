"""Trace: what a launch's device did in one step, by name, how often and for how long; and its JSON.

Counts have no noise, times have some. A trace that could not prove itself complete has no rows, and says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

from pytest_llmperf.records.rank_work import RankWork, rank_work

Kind = Literal["kernel", "collective", "copy", "fill", "operator", "wait", "allocation"]

#: Work of a device; on the CPU operators stand for it. Then what the host does that it need not do in each step.
KINDS: tuple[Kind, ...] = get_args(Kind)

#: Kinds that keep the device busy.
WORK: frozenset[str] = frozenset({"kernel", "collective", "copy", "fill", "operator"})

#: What counts by an exact gate, by the name of its metric.
COUNTED: Mapping[str, frozenset[str]] = {
    "kernels_per_step": frozenset({"kernel", "collective", "fill"}),
    "operators_per_step": frozenset({"operator"}),
    "copies_per_step": frozenset({"copy"}),
    "synchronisations_per_step": frozenset({"wait"}),
}

#: Why a launch that was asked for none has none.
UNWANTED = "it was not asked for"

_LONGEST_NAME = 240

# Kernels or seconds that no step has.
_MOST = 1e9


def short_name(name: str) -> str:
    """``name`` on one line, cut where templates make it longer than anybody reads, with a hash that tells it apart."""
    name = " ".join(name.split())
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}#{hashlib.sha256(name.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, order=True)
class TraceRow:
    """One name."""

    kind: str
    name: str
    count: float
    """In a step; no whole number where ranks differ, of which it is the mean then."""
    seconds: float
    """In a step, all of them together; of operators without those that they call."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step, the mean of those that were traced, which had the same rows with the same counts."""

    rows: tuple[TraceRow, ...] = ()
    """Sorted."""
    steps: int = 0
    """How many were traced."""
    ranks: int = 1
    """How many were, each by itself; times are their means."""
    step_seconds: float = 0.0
    busy_seconds: float = 0.0
    """In which the device did anything, mean of the ranks."""
    exposed_seconds: float = 0.0
    """In which it only exchanged with other ranks."""
    data_seconds: float = 0.0
    """In which it did nothing and the host fetched the next batch."""
    by_rank: tuple[RankWork, ...] = ()
    """Of several ranks, what their mean hides; older traces have none."""
    none: str = ""
    """Why there is no trace, if there is none."""

    def __bool__(self) -> bool:
        return not self.none and bool(self.rows)

    @property
    def idle_seconds(self) -> float:
        """In which the device did nothing and no batch was fetched."""
        return max(0.0, self.step_seconds - self.busy_seconds - self.data_seconds)

    def count(self, metric: str) -> float:
        """How much of a metric of ``COUNTED`` a step has."""
        return sum(row.count for row in self.rows if row.kind in COUNTED[metric])

    @property
    def counts(self) -> dict[tuple[str, str], float]:
        """Kind and name to count, of what gates: allocations come and go with the allocator's state."""
        return {(row.kind, row.name): row.count for row in self.rows if row.kind != "allocation"}

    @property
    def is_on_host(self) -> bool:
        """Whether operators of a CPU were counted in place of kernels."""
        return any(row.kind == "operator" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; rows by kind and name, so that each is one line of a sorted file."""
        if self.none:
            return {"none": self.none}
        rows: dict[str, dict[str, list[float]]] = {}
        for row in self.rows:
            rows.setdefault(row.kind, {})[row.name] = [row.count, row.seconds]
        return {
            "steps": self.steps,
            "ranks": self.ranks,
            "step_seconds": self.step_seconds,
            "busy_seconds": self.busy_seconds,
            "exposed_seconds": self.exposed_seconds,
            "data_seconds": self.data_seconds,
            "rows": rows,
            **({"by_rank": [work.to_dict() for work in self.by_rank]} if self.by_rank else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trace:
        """As ``to_dict`` wrote it.

        Raises:
            ValueError: it was not, or it was edited since.
        """
        if not isinstance(values, Mapping):
            raise ValueError("its trace is no object")
        if set(values) == {"none"}:
            return cls(none=" ".join(str(values["none"]).split()) or "nobody said why")
        wanted = {"steps", "ranks", "step_seconds", "busy_seconds", "exposed_seconds", "data_seconds", "rows"}
        if {*values} - {"by_rank"} != wanted:
            raise ValueError(f"its trace has {', '.join(sorted(values))}; expected {', '.join(sorted(wanted))}")
        try:
            return cls(
                rows=tuple(sorted(_rows(values["rows"]))),
                steps=_some(values["steps"]),
                ranks=_some(values["ranks"]),
                step_seconds=_seconds(values["step_seconds"]),
                busy_seconds=_seconds(values["busy_seconds"]),
                exposed_seconds=_seconds(values["exposed_seconds"]),
                data_seconds=_seconds(values["data_seconds"]),
                by_rank=tuple(map(RankWork.from_dict, values.get("by_rank", ()))),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"its trace cannot be read ({error})") from error


def _rows(values: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterable[TraceRow]:
    for kind, named in values.items():
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
        for name, (count, seconds) in named.items():
            row = TraceRow(kind, name, float(count), float(seconds))
            if not (0 < row.count < _MOST and 0 <= row.seconds < _MOST):
                raise ValueError(f"{short_name(name)}: {count} in {seconds} s")
            yield row


def _some(value: Any) -> int:
    if int(value) < 1:
        raise ValueError(f"{value} steps or ranks")
    return int(value)


def _seconds(value: Any) -> float:
    if not 0 <= float(value) < _MOST:
        raise ValueError(f"{value} s")
    return float(value)


def _kept(count: float) -> float:
    """As a file keeps it: a third of a kernel that is stored must be the third that the next launch has."""
    return float(f"{count:.6g}")


def merged(traces: Sequence[Trace]) -> Trace:
    """Those of all ranks as one; none where any rank has none."""
    for rank, trace in enumerate(traces):
        if not trace:
            return Trace(none=f"rank {rank}: {trace.none}" if len(traces) > 1 else trace.none)
    by_name: dict[tuple[str, str], list[TraceRow]] = {}
    for trace in traces:
        for row in trace.rows:
            by_name.setdefault((row.kind, row.name), []).append(row)
    ranks = len(traces)
    exchanges = [sum(row.seconds for row in trace.rows if row.kind == "collective") for trace in traces]
    return Trace(
        rows=tuple(
            sorted(
                TraceRow(
                    kind, name, _kept(sum(row.count for row in rows) / ranks), sum(row.seconds for row in rows) / ranks
                )
                for (kind, name), rows in by_name.items()
            )
        ),
        steps=traces[0].steps,
        ranks=ranks,
        step_seconds=max(trace.step_seconds for trace in traces),
        busy_seconds=fmean(trace.busy_seconds for trace in traces),
        exposed_seconds=fmean(trace.exposed_seconds for trace in traces),
        data_seconds=fmean(trace.data_seconds for trace in traces),
        by_rank=rank_work([trace.counts for trace in traces], exchanges) if ranks > 1 else (),
    )
