"""Baseline: the accepted launches, trace and static figures of one spec on one machine kind, and their history."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pytest_llmperf.judge.baseline_file import (
    Accepted,
    BaselineError,
    Document,
    same_anchor,
    same_figures,
    same_settings,
    shared,
    side_by_side,
)
from pytest_llmperf.judge.repeats import Repeats
from pytest_llmperf.judge.stats import labels
from pytest_llmperf.judge.validity import unusable
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, METRICS, RATE, counts, measured
from pytest_llmperf.records.phases import HELD
from pytest_llmperf.records.result import Check, Verdict
from pytest_llmperf.records.steady_state import MOST_GROWTH
from pytest_llmperf.records.trace import StaticStep, Trace
from pytest_llmperf.support import codec
from pytest_llmperf.support.formats import in_sentence

# Those of Python and numpy choose no kernel.
_IRRELEVANT = frozenset({"python", "numpy"})


@dataclass(frozen=True, kw_only=True)
class StoredTrace:
    """Of the launch that was accepted last and had one."""

    trace: Trace
    versions: Mapping[str, str]
    counts: Mapping[str, float]
    """Of what is counted elsewhere than in the trace: graph breaks, recompilations, the allocator's retries."""

    @classmethod
    def of(cls, launches: Sequence[Launch]) -> StoredTrace | None:
        """Of the newest of ``launches`` that has a trace."""
        for launch in reversed(launches):
            if launch.trace:
                return cls(trace=launch.trace, versions=launch.environment.versions, counts=other_counts(launch))
        return None

    def other_versions(self, launch: Launch) -> tuple[str, ...]:
        """What differs in the versions of ``launch``, ``name: then -> now``; its counts are news then, and no gate."""
        mine, theirs = self.versions, launch.environment.versions
        # Of a package that only one of the two knows nothing is known; without torch's version no count is exact.
        compared = sorted(({*mine} & {*theirs} - _IRRELEVANT) | {"torch"})
        told = [(name, mine.get(name, "unknown"), theirs.get(name, "unknown")) for name in compared]
        return tuple(f"{name}: {then} -> {now}" for name, then, now in told if then != now or then == "unknown")

    def to_plain(self) -> dict[str, Any]:
        """With a sum over what is exact in it: nobody edits a count by hand unseen."""
        values = codec.plain_fields(self)
        return {**values.pop("trace"), **values, "sum": _sum(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> StoredTrace:
        own = {name: value for name, value in values.items() if name in ("versions", "counts")}
        trace = {name: value for name, value in values.items() if name not in ("versions", "counts", "sum")}
        stored = codec.read_fields(cls, {**own, "trace": codec.read(Trace, trace)}, "its trace")
        if values.get("sum") != _sum(stored):
            raise ValueError("its trace was edited: its counts do not have the sum that was written with them")
        return stored


def other_counts(launch: Launch) -> dict[str, float]:
    """What a launch counted by other means than its trace."""
    found = {name: launch.evidence.get(row.evidence) for name, row in counts().items() if row.evidence}
    # Of what is not compiled, nothing breaks.
    kept = {name: count for name, count in found.items() if isinstance(count, int) and not isinstance(count, bool)}
    return {name: float(count) for name, count in kept.items()}


def _sum(stored: StoredTrace) -> str:
    counts = sorted((kind, name, f"{count:.6g}") for (kind, name), count in stored.trace.counts.items())
    others = sorted((name, f"{count:.6g}") for name, count in stored.counts.items())
    return hashlib.sha256(json.dumps([counts, others, sorted(stored.versions.items())]).encode()).hexdigest()[:16]


# A step without a launch: its static figures, and who accepted them when.

#: In place of a machine kind, of the figures of a case that has no baseline of any.
ANY_MACHINE: Literal["static"] = "static"


@codec.sparse()
@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """A step that was accepted."""

    step: StaticStep
    recorded_at: str
    """UTC, ISO 8601."""
    reason: str = ""
    revision: str = ""
    """Commit of the tree that it was told of; empty where there is none."""

    def to_plain(self) -> dict[str, Any]:
        values = codec.plain_fields(self)
        return {**values.pop("step"), **values}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> StoredStep:
        accepted = ("recorded_at", "reason", "revision")
        own = {name: value for name, value in values.items() if name in accepted}
        step = {name: value for name, value in values.items() if name not in accepted}
        return codec.read_fields(cls, {"recorded_at": "", **own, "step": codec.read(StaticStep, step)})


@codec.sparse("machine")
@dataclass(frozen=True, kw_only=True)
class StepBaseline(Document):
    """Static figures of a case that has no baseline of any machine kind."""

    static: StoredStep
    machine: Literal["static"] = ANY_MACHINE
    on_cpu: bool = False
    """Whether a run of the cases for the CPU recorded it: one of those for GPUs asks for others."""

    noun: ClassVar[str] = "static figures"

    def check(self) -> None:
        same_settings(self.spec, self.digest)


#: Sessions from which on a baseline says how sessions differ.
CALIBRATED_SESSIONS = 3


@codec.sparse()
@dataclass(frozen=True, kw_only=True)
class Baseline(Document):
    """What a case is held against."""

    launches: tuple[Launch, ...]
    anchor: Accepted
    history: tuple[Accepted, ...]
    """Every acceptance, newest last; the anchor is the first."""
    trace: StoredTrace | None = None
    """Of its newest launch that had one; ``None`` in old files."""
    static: StoredStep | None = None
    """What its step is without a launch, where that was recorded."""
    repeats: Repeats | None = None
    """What of it is exact, of a user's own training."""

    @property
    def sessions(self) -> int:
        """Different hosts or days that its launches are of: the GPUs of one host on one day know the same air.

        A host that was booted anew is known by its GPUs.
        """
        days = (launch.started_at[:10] for launch in self.launches)
        return len(set(zip(labels(self.launches)["host"], days, strict=True)))

    @property
    def newest(self) -> tuple[Launch, ...]:
        """The launches that were accepted last."""
        return self.launches[-max(1, self.history[-1].launches) :]

    @property
    def held(self) -> list[tuple[Accepted, tuple[Launch, ...]]]:
        """The launches of each acceptance, newest first, as far as they are there: the last one may lack its oldest."""
        groups, rest = [], self.launches
        for entry in reversed(self.history):
            if not rest or entry.launches <= 0:
                break
            groups.append((entry, rest[-entry.launches :]))
            rest = rest[: -entry.launches]
        return groups

    @property
    def explained(self) -> tuple[Launch, ...]:
        """The launches that were accepted with the last reason that was given, and since; all of them without one."""
        last = max((number for number, entry in enumerate(self.history) if entry.reason), default=0)
        return self.launches[-max(1, sum(entry.launches for entry in self.history[last:])) :]

    @property
    def maturity(self) -> str:
        """``provisional``, or ``calibrated`` once three sessions have said how they differ."""
        return "calibrated" if self.sessions >= CALIBRATED_SESSIONS else "provisional"

    noun: ClassVar[str] = "a baseline"

    def to_plain(self) -> dict[str, Any]:
        """Environments, setups and calibrations, which many launches have in common, once each."""
        environments, setups, calibrations = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        values = codec.plain_fields(self)
        for record, launch in zip(values["launches"], self.launches, strict=True):
            # Of the phases those that decide something. One trace is kept, beside the launches.
            held = {name: seconds for name, seconds in launch.phases.items() if name in HELD}
            for name in ("trace", "phases"):
                record.pop(name, None)
            record.update({"phases": held} if held else {})
            record["environment"] = shared(record["environment"], environments)
            if "setup" in record["evidence"]:
                record["evidence"]["setup"] = shared(record["evidence"]["setup"], setups)
            for rank in record["ranks"]:
                if "calibration" in rank:
                    rank["calibration"] = shared(rank["calibration"], calibrations)
                if (launch.allocated_growth or 0.0) <= MOST_GROWTH:  # a growth that was accepted alone has to be known
                    rank.pop("allocated_bytes", None)
        shelves = {"environments": environments, "setups": setups, "calibrations": calibrations}
        return values | {name: shelf for name, shelf in shelves.items() if shelf}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Baseline:
        stored = codec.read(_Stored, {name: values[name] for name in _SHELVES if name in values}, "it")
        rest = {name: value for name, value in values.items() if name not in _SHELVES}
        return codec.read_fields(cls, {**rest, "launches": [stored.launch(record) for record in stored.launches]}, "it")

    def check(self) -> None:
        if not self.launches or not self.history:
            raise ValueError("it holds no launch, or no history")
        if {launch.digest for launch in self.launches} != {self.digest}:
            raise ValueError("its launches are of other settings than its digest")
        same_settings(self.spec, self.digest)
        for line in (line for launch in self.launches for line in unusable(launch)):
            raise ValueError(line)
        same_anchor(self.anchor, self.history)
        same_figures(self.launches, self.history)


_SHELVES = ("launches", "environments", "setups", "calibrations")

# What a setup tells by name; all else of it is compared as it is.
_TOPICS = "config modules dropout buffer_dtypes hooks optimizer torch python step overhead sources".split()


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Launches as a file has them, and what they refer to."""

    launches: tuple[Mapping[str, Any], ...]
    environments: Mapping[str, Mapping[str, Any]]
    setups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    calibrations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def launch(self, record: Mapping[str, Any]) -> Launch:
        evidence, ranks = record.get("evidence"), record.get("ranks")
        found = {**record, "environment": _referred(record, "environment", self.environments)}
        if isinstance(evidence, Mapping) and "setup" in evidence:
            setup = _referred(evidence, "setup", self.setups)
            for topic in _TOPICS:
                if not isinstance(setup.get(topic, {}), Mapping):
                    raise ValueError(f"{topic} of a setup is {setup[topic]!r}, expected an object")
            found["evidence"] = {**evidence, "setup": setup}
        if isinstance(ranks, (list, tuple)):
            found["ranks"] = [self._rank(rank) for rank in ranks]
        return codec.read(Launch, found)

    def _rank(self, rank: object) -> object:
        if not isinstance(rank, Mapping) or "calibration" not in rank:
            return rank
        return {**rank, "calibration": _referred(rank, "calibration", self.calibrations)}


def _referred(record: Mapping[str, Any], name: str, shelf: Mapping[str, Any]) -> Any:
    key = record.get(name)
    if not isinstance(key, str) or key not in shelf:
        raise ValueError(f"{name} is {key!r}, expected one of {', '.join(shelf) or 'none'}")
    return shelf[key]


def size_of(baseline: Baseline) -> str:
    """``3 launches in 2 sessions, provisional``."""
    launches, sessions = len(baseline.launches), baseline.sessions
    counts = f"{launches} {'launch' if launches == 1 else 'launches'} in {sessions} "
    return f"{counts}{'session' if sessions == 1 else 'sessions'}, {baseline.maturity}"


def describe(old: Baseline | None, new: Baseline) -> list[str]:
    """Old, new and anchor side by side, for people."""

    row = measured(new.launches)[RATE]

    def figures(entry: Accepted) -> str:
        rate, memory = (
            in_sentence(entry.metrics[name], unit) if name in entry.metrics else "-"
            for name, unit in ((row.name, row.label), (MEMORY, "bytes"))
        )
        return f"{rate:>23}  {memory:>10}"

    before = old.history[-1] if old else None
    held = [f"  {new.repeats.words(new.launches)}; speed in {row.label}"] if new.repeats else []
    return [f"recorded {new.id} ({size_of(new)})", *side_by_side(before, new.history[-1], new.anchor, figures), *held]


# The largest micro-batch of one spec on one machine kind, its history, and the verdict.

CAPACITY_METRIC = "max_micro_batch_size"


@dataclass(frozen=True, kw_only=True)
class CapacityBaseline(Document):
    """What the largest micro-batch of a spec is held against."""

    anchor: Accepted
    history: tuple[Accepted, ...]
    """Every acceptance, newest last; the anchor is the first."""

    @property
    def size(self) -> int:
        """Sequences per rank and forward pass."""
        return int(self.history[-1].metrics[CAPACITY_METRIC])

    noun: ClassVar[str] = "a baseline of a largest micro-batch"

    def check(self) -> None:
        if not self.history:
            raise ValueError("it holds no history")
        same_anchor(self.anchor, self.history)
        size = self.history[-1].metrics.get(CAPACITY_METRIC)
        if not (size or 0.0) >= 1:
            raise ValueError(f"{CAPACITY_METRIC} is {size}, expected 1 or more")


def describe_capacity(old: CapacityBaseline | None, new: CapacityBaseline) -> list[str]:
    """Old, new and anchor side by side, for people."""

    def figures(entry: Accepted) -> str:
        memory = in_sentence(entry.metrics[MEMORY], "bytes") if MEMORY in entry.metrics else "-"
        return f"{entry.metrics[CAPACITY_METRIC]:>13.0f} sequences  {memory:>10}"

    before = old.history[-1] if old else None
    return [f"recorded {new.id}", *side_by_side(before, new.history[-1], new.anchor, figures)]


def judge_capacity(size: int, baseline: CapacityBaseline | None) -> Check:
    """The check of the largest micro-batch: memory is nearly exact, so one that is gone is a loss."""
    check = METRICS[CAPACITY_METRIC].check(size, tolerance=0.0, verdict="new")
    if baseline is None:
        return check
    stored = baseline.size
    verdict: Verdict = "regressed" if size < stored else "improved" if size > stored else "pass"
    return replace(check, baseline=stored, limit=stored, change=size / stored - 1, verdict=verdict)


def accept_capacity(old: CapacityBaseline | None, new: CapacityBaseline) -> CapacityBaseline:
    """``new``, of one acceptance, after those of ``old``; BaselineError: it is smaller, and nobody said why."""
    if old is None:
        return new
    if new.size < old.size and not new.anchor.reason:
        sizes = f"{CAPACITY_METRIC} {old.size} -> {new.size}"
        raise BaselineError(f'{new.id}: worse ({sizes}); accept it with --perf-reason "why"')
    return replace(new, anchor=old.anchor, history=(*old.history, *new.history))
