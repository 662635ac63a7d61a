"""Trace: what a launch's device did in one step, by name, how often and for how long; and its JSON.

Counts have no noise, times have some. A trace that could not prove itself complete has no rows, and says why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean, median_low
from typing import Annotated, Any, Literal

from msgspec import Meta

from pytest_llmperf.support import grouped
from pytest_llmperf.support.codec import Amount, Count, plain_fields, read, read_fields, sparse
from pytest_llmperf.support.files import hashed

#: Work of a device; on the CPU operators stand for it. Then what the host does that it need not do in each step, and
#: what it asks to be exchanged with other ranks: how often, and the bytes of that.
Kind = Literal["kernel", "collective", "copy", "fill", "operator", "wait", "allocation", "exchange", "payload"]

#: Kinds that keep the device busy.
WORK: frozenset[str] = frozenset({"kernel", "collective", "copy", "fill", "operator"})

#: What counts by an exact gate, by the name of its metric.
COUNTED: Mapping[str, frozenset[str]] = {
    "kernels_per_step": frozenset({"kernel", "collective", "fill"}),
    "operators_per_step": frozenset({"operator"}),
    "copies_per_step": frozenset({"copy"}),
    "synchronisations_per_step": frozenset({"wait"}),
    "collectives_per_step": frozenset({"exchange"}),
    "collective_bytes_per_step": frozenset({"payload"}),
}
_OF_EXCHANGES = {"collectives_per_step", "collective_bytes_per_step"}

#: Packages that choose no kernel and call no operator.
COUNTLESS = frozenset({"python", "numpy"})

#: Why a launch that was asked for none has none.
UNWANTED = "it was not asked for"

_LONGEST_NAME = 240
# Ranks that all do something else are told by their counts' means; of names that a file has to keep this is enough.
_MOST_NAMES = 20
# What only calls others.
_CALLERS = frozenset("aten::item aten::is_nonzero aten::to aten::_to_copy aten::clone aten::contiguous".split())

# Seconds that no step has; kernels, or bytes that are exchanged.
_MOST, _MOST_COUNT = 1e9, 1e15
_Some = Annotated[float, Meta(ge=0, lt=_MOST)]
_Much = Annotated[float, Meta(ge=0, lt=_MOST_COUNT)]


def short_name(name: str) -> str:
    """``name`` on one line, cut where templates make it longer than anybody reads, with a hash that tells it apart."""
    name = " ".join(name.split())
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 9]}#{hashed(name)[:8]}"


@dataclass(frozen=True, order=True)
class TraceRow:
    kind: str
    name: str
    count: float
    """In a step; no whole number where ranks differ, of which it is the mean then."""
    seconds: float
    """In a step, all of them together; of operators without those that they call."""


Key = tuple[str, str]
"""Kind and name of a trace's row."""


@sparse("exchange_seconds")
@dataclass(frozen=True)
class RankWork:
    """Of one rank."""

    exchange_seconds: Amount
    """In which its device was in exchanges with other ranks, a step: the longer, the longer it waited in them."""
    apart: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By a row's kind and name, how many more of it than the rank in the middle has, a step; negative: fewer."""
    parts: Mapping[str, Amount] = field(default_factory=dict)
    """Seconds of a step beside exchanges: its device's ``work``, its ``host``, its ``data``; older traces have none."""

    @property
    def more(self) -> dict[Key, float]:
        return {(kind, name): more for kind, named in self.apart.items() for name, more in named.items()}


def _rank_work(traces: Sequence[Trace]) -> Iterator[RankWork]:
    """The work of each rank, from the counts of all in their order."""
    counts = [trace.counts for trace in traces]
    names = sorted({name for each in counts for name in each})
    usual = {name: median_low([each.get(name, 0.0) for each in counts]) for name in names}
    for own, trace in zip(counts, traces, strict=True):
        apart = [(name, own.get(name, 0.0) - usual[name]) for name in names if own.get(name, 0.0) != usual[name]]
        most = sorted(apart, key=lambda each: -abs(each[1]))[:_MOST_NAMES]
        kinds: dict[str, dict[str, float]] = {}
        for (kind, name), more in sorted(most):
            kinds.setdefault(kind, {})[name] = more
        data, exchanging = trace.data_seconds, trace.exchange_seconds
        # What calls others on a host is its own: a hook, for instance, that waits.
        work = sum(row.seconds for row in trace.rows if row.kind in WORK and row.name.startswith("aten::"))
        if not trace.is_on_host:
            work, exchanging = trace.busy_seconds - trace.exposed_seconds, trace.exposed_seconds
        host = trace.step_seconds - work - data - exchanging
        parts = {"work": max(0.0, work), "host": max(0.0, host), "data": data}
        yield RankWork(trace.exchanging_seconds, kinds, parts)


@sparse("steps", "ranks", "step_seconds", "busy_seconds", "exposed_seconds", "data_seconds", "rows")
@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step, the mean of those that were traced, which had the same rows with the same counts."""

    steps: int = 0
    ranks: int = 1
    """How many were, each by itself; times are their means."""
    step_seconds: float = 0.0
    busy_seconds: float = 0.0
    """In which the device did anything, mean of the ranks."""
    exposed_seconds: float = 0.0
    """In which it only exchanged with other ranks; of a CPU nobody knows."""
    data_seconds: float = 0.0
    """In which it did nothing and the host fetched the next batch."""
    exchange_seconds: float = 0.0
    """Of a CPU's ranks, in which exchanges were under way; of a device's its collectives' rows tell."""
    rows: tuple[TraceRow, ...] = ()
    by_rank: tuple[RankWork, ...] = ()
    """Of several ranks, what their mean hides; older traces have none."""
    places: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By kind, the lines of Python that wait, copy or lead to calls, and how often a step; the most frequent. Of a
    script also the seconds of a step in which its host was at a line; where memory grew, also what each step left."""
    none: str = ""
    """Why there is no trace, if there is none."""

    def __bool__(self) -> bool:
        return not self.none and bool(self.rows)

    @property
    def exchanging_seconds(self) -> float:
        """In which exchanges were under way, by whatever tells; the mean of its ranks."""
        return self.exchange_seconds or sum(row.seconds for row in self.rows if row.kind == "collective")

    @property
    def exposed_share(self) -> float | None:
        """Of the step its device only exchanged; ``None`` where nothing tells of that."""
        tells = self.step_seconds > 0 and any(row.kind == "collective" for row in self.rows)
        return self.exposed_seconds / self.step_seconds if tells else None

    @property
    def idle_seconds(self) -> float:
        """In which the device did nothing and no batch was fetched."""
        return max(0.0, self.step_seconds - self.busy_seconds - self.data_seconds)

    def count(self, metric: str) -> float:
        """How much of a metric of ``COUNTED`` a step has."""
        return sum(row.count for row in self.rows if row.kind in COUNTED[metric])

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those of ``COUNTED`` that it tells: of exchanges where there are some, since older traces tell of none."""
        absent = {"kernels_per_step" if self.is_on_host else "operators_per_step"}
        absent |= set() if any(row.kind == "exchange" for row in self.rows) else _OF_EXCHANGES
        return tuple(name for name in COUNTED if self and name not in absent)

    @property
    def counts(self) -> dict[tuple[str, str], float]:
        """Kind and name to count, of what gates: allocations come and go with the allocator's state."""
        return {(row.kind, row.name): row.count for row in self.rows if row.kind != "allocation"}

    @property
    def is_on_host(self) -> bool:
        """Whether operators of a CPU were counted in place of kernels."""
        return any(row.kind == "operator" for row in self.rows)

    def to_plain(self) -> dict[str, Any]:
        """Rows by kind and name, so that each is one line of a sorted file; the reason alone where there are none."""
        if self.none:
            return {"none": self.none}
        rows: dict[str, dict[str, list[float]]] = {}
        for row in self.rows:
            rows.setdefault(row.kind, {})[row.name] = [row.count, row.seconds]
        values = {**plain_fields(self), "rows": rows}
        if self.is_on_host:  # where nobody knows what an exchange hides
            del values["exposed_seconds"]
        return values

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Trace:
        if set(values) == {"none"}:
            return cls(none=" ".join(str(values["none"]).split()) or "nobody said why")
        stored = read(TraceForm, values, "its trace")
        rows = (TraceRow(kind, name, *told) for kind, named in stored.rows.items() for name, told in named.items())
        return cls(**{**vars(stored), "rows": tuple(sorted(rows))})


@dataclass(frozen=True, kw_only=True)
class TraceForm:
    """One as files have it, where it has rows."""

    steps: Annotated[int, Meta(ge=1)]
    ranks: Annotated[int, Meta(ge=1)]
    step_seconds: _Some
    busy_seconds: _Some
    data_seconds: _Some
    rows: Mapping[Kind, Mapping[str, tuple[Annotated[float, Meta(gt=0, lt=_MOST_COUNT)], _Some]]]
    exposed_seconds: _Some = 0.0
    exchange_seconds: _Some = 0.0
    by_rank: tuple[RankWork, ...] = ()
    places: Mapping[str, Mapping[str, Annotated[float, Meta(gt=0, lt=_MOST)]]] = field(default_factory=dict)


def merged(traces: Sequence[Trace]) -> Trace:
    """Those of all ranks as one; none where any rank has none."""
    for rank, trace in enumerate(traces):
        if not trace:
            return Trace(none=f"rank {rank}: {trace.none}" if len(traces) > 1 else trace.none)
    by_name = grouped(((row.kind, row.name), row) for trace in traces for row in trace.rows)
    ranks, rows = len(traces), []
    for (kind, name), own in by_name.items():
        count, seconds = sum(row.count for row in own) / ranks, sum(row.seconds for row in own) / ranks
        # As a file keeps it: a third of a kernel that is stored must be the third that the next launch has.
        rows.append(TraceRow(kind, name, float(f"{count:.6g}"), seconds))
    places: dict[str, dict[str, float]] = {}
    all_places = {(kind, place) for trace in traces for kind, each in trace.places.items() for place in each}
    for kind, place in sorted(all_places):
        mean = fmean(trace.places.get(kind, {}).get(place, 0.0) for trace in traces)
        places.setdefault(kind, {})[place] = float(f"{mean:.6g}")
    return Trace(
        rows=tuple(sorted(rows)),
        steps=traces[0].steps,
        ranks=ranks,
        step_seconds=max(trace.step_seconds for trace in traces),
        busy_seconds=fmean(trace.busy_seconds for trace in traces),
        exposed_seconds=fmean(trace.exposed_seconds for trace in traces),
        data_seconds=fmean(trace.data_seconds for trace in traces),
        exchange_seconds=fmean(trace.exchange_seconds for trace in traces),
        by_rank=tuple(_rank_work(traces)) if ranks > 1 else (),
        places=places,
    )


#: The kind of place of what each step leaves behind: kinds of objects, and the variables that lead to them.
LEFT = "left"
#: That of where the host was: seconds of a step.
SPENT = "host"
#: Lines that are kept of each kind.
MOST_PLACES = 60
#: Between a line of the user's project and the line of a package that it led to.
LEADS_TO = " => "


def new_places(metric: str, then: Trace | StaticStep, now: Trace | StaticStep) -> list[str]:
    """Where a step waits or copies more often than ``then``, most first: ``30 a step at train.py:61 (`loss.item()`)``.
    Lines above a place come and go: its number is not compared. Where ``then`` names no place, all are new.

    A call has each line that led to it: first the one that is new, or grew by the greatest share. Of calls an older
    ``then`` tells nothing, and one with all lines that are kept may have had as many as its last at any other."""
    found = []
    for kind in COUNTED[metric]:
        are_calls, before = kind == "operator", then.places.get(kind, {})
        if are_calls and not before:
            continue
        known, rest = by_text(before), min(before.values()) if are_calls and len(before) >= MOST_PLACES else 0.0
        left = dict(known)
        for place, count in now.places.get(kind, {}).items():
            text = without_lines(place)
            more = count - left.get(text, rest)
            left[text] = max(0.0, -more)
            share, calls = (more / known.get(text, 1e-9), f" call{'s' * (more != 1)}") if are_calls else (0.0, "")
            found += [(-share, -more, f"{more:g}{calls} a step at {shown_place(place)}")] if more > 0 else []
    return [told for *_, told in sorted(found)]


def shown_place(place: str) -> str:
    lines = (line.partition(" ") for line in place.split(LEADS_TO))  # "; " is what parts reasons
    return LEADS_TO.join(f"{at} (`{text.replace('; ', ';')}`)" if text else at for at, _, text in lines)


def by_text(places: Mapping[str, float]) -> dict[str, float]:
    """Added up, without the numbers of lines."""
    found = dict[str, float]()
    for place, number in places.items():
        found[without_lines(place)] = found.get(without_lines(place), 0.0) + number
    return found


def without_lines(place: str) -> str:
    return re.sub(r":\d+(?= |$)", "", place)


@sparse()
@dataclass(frozen=True, kw_only=True)
class StaticStep:
    """One rank's step without noise: as fake tensors tell it, or as a CPU takes it of a script made small."""

    operators: Mapping[str, Count | _Some]
    """How often each is called, without the names of overloads; kernels of Liger's as ``liger::…``."""
    flops: Mapping[str, Count]
    memory: Mapping[str, Count]
    """Bytes at the predicted peak, by part."""
    versions: Mapping[str, str]
    """With which it is exact."""
    exchanges: Mapping[str, tuple[Count | _Much, Count | _Much]] = field(default_factory=dict)
    """With other ranks, by kind and dimension of the mesh: how many, and their bytes; older figures tell of none."""
    padding: Count = field(default=0, compare=False)
    """Bytes that the shards of all ranks have beyond the model."""
    places: Mapping[str, Mapping[str, float]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, trace: Trace, versions: Mapping[str, str]) -> StaticStep:
        """What a step did on a CPU; of what only calls others, those are counted."""
        rows = (row for row in trace.rows if row.name not in _CALLERS and not row.name.startswith("autograd::"))
        counts = {row.name: _whole(row.count) for row in rows if row.kind in WORK | {"wait"}}
        sizes = {row.name: _whole(row.count) for row in trace.rows if row.kind == "payload"}
        asked = {row.name: (_whole(row.count), sizes.get(row.name, 0)) for row in trace.rows if row.kind == "exchange"}
        places = {kind: places for kind, places in trace.places.items() if kind != SPENT}
        return cls(operators=counts, flops={}, memory={}, versions=versions, exchanges=asked, places=places)

    @property
    def counts(self) -> dict[str, float]:
        """Of operators, of exchanges and of their bytes."""
        sizes = {f"bytes of {name}": size for name, (_, size) in self.exchanges.items()}
        return {**self.operators, **{name: count for name, (count, _) in self.exchanges.items()}, **sizes}

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())

    def other_versions(self, now: StaticStep) -> tuple[str, ...]:
        """The versions of ``now`` that differ, ``name: then -> now``."""
        names = sorted({*self.versions, *now.versions})
        both = ((name, self.versions.get(name, "none"), now.versions.get(name, "none")) for name in names)
        return tuple(f"{name}: {then} -> {there}" for name, then, there in both if then != there)

    def to_plain(self) -> dict[str, Any]:
        """With a sum: nobody edits a count by hand unseen."""
        return {**plain_fields(self), "sum": _sum(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> StaticStep:
        step = read_fields(cls, {name: value for name, value in values.items() if name != "sum"})
        if values.get("sum") != _sum(step):
            raise ValueError("its static figures were edited: they do not have the sum that was written with them")
        return step


def _whole(count: float) -> float:
    return int(count) if count == int(count) else count


def _sum(step: StaticStep) -> str:
    told = [each.name for each in fields(step) if each.compare and (each.name != "exchanges" or step.exchanges)]
    return hashed(json.dumps([sorted(getattr(step, name).items()) for name in told]))
