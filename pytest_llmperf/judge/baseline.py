"""Baseline: the accepted launches of one spec on one machine kind, their history, and their JSON. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llmperf.judge.baseline_file import (
    SCHEMA,
    Accepted,
    BaselineError,
    dump,
    parse,
    refusing,
    shared,
    side_by_side,
)
from pytest_llmperf.judge.integrity import same_anchor, same_figures, same_settings
from pytest_llmperf.judge.noise import labels
from pytest_llmperf.judge.stored_step import StoredStep
from pytest_llmperf.judge.validity import unusable
from pytest_llmperf.records.allocated_growth import MOST_GROWTH
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, RATE, counts
from pytest_llmperf.records.phases import HELD
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.support.formats import in_sentence
from pytest_llmperf.support.json_fields import typed

# StoredTrace: the trace that a baseline keeps, of the versions with which it is exact, and its JSON. Pure.


# Those of Python and numpy choose no kernel.
_IRRELEVANT = frozenset({"python", "numpy"})


@dataclass(frozen=True, kw_only=True)
class StoredTrace:
    """Of the launch that was accepted last and had one."""

    trace: Trace
    versions: Mapping[str, str]
    """Of the environment that it was traced in."""
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

    def to_dict(self) -> dict[str, Any]:
        """With a sum over what is exact in it: nobody edits a count by hand unseen."""
        values = {"versions": dict(self.versions), "counts": dict(self.counts), **self.trace.to_dict()}
        return {**values, "sum": _sum(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StoredTrace:
        """As ``to_dict`` wrote it.

        Raises:
            ValueError: it was not, or it was edited since.
        """
        own = ("versions", "counts", "sum")
        missing = [name for name in own if name not in values]
        if missing:
            raise ValueError(f"its trace has no {missing[0]}")
        trace = Trace.from_dict({name: value for name, value in values.items() if name not in own})
        try:
            versions = {str(name): str(version) for name, version in values["versions"].items()}
            counts = {str(name): float(count) for name, count in values["counts"].items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"its trace cannot be read ({error})") from error
        stored = cls(trace=trace, versions=versions, counts=counts)
        if values["sum"] != _sum(stored):
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


#: Sessions from which on a baseline says how sessions differ.
CALIBRATED_SESSIONS = 3


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a case is held against."""

    id: str
    digest: str
    machine: str
    spec: Mapping[str, Any]
    recorded_by: str
    """The test that recorded it; for people and for finding unused files, never an identity."""
    launches: tuple[Launch, ...]
    anchor: Accepted
    """The first accepted figures."""
    history: tuple[Accepted, ...]
    """Every acceptance, newest last; the anchor is the first."""
    trace: StoredTrace | None = None
    """Of its newest launch that had one; ``None`` in old files."""
    static: StoredStep | None = None
    """What its step is without a launch, where that was recorded."""

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

    def to_json(self) -> str:
        """Sorted and stable; arrays of numbers on one line, environments once each.

        Raises:
            BaselineError: a figure that is not finite, which no reader would take back.
        """
        environments: dict[str, Any] = {}
        setups: dict[str, Any] = {}
        calibrations: dict[str, Any] = {}
        launches = []
        for launch in self.launches:
            record = launch.to_dict()
            # Of the phases those that decide something. One trace is kept, below.
            held = {name: seconds for name, seconds in launch.phases.items() if name in HELD}
            record = {name: value for name, value in record.items() if name not in ("phases", "trace")}
            record |= {"phases": held} if held else {}
            if "setup" in record["evidence"]:
                record["evidence"] |= {"setup": shared(record["evidence"]["setup"], setups)}
            # One of a day and GPU, and launches of a day are many.
            record["ranks"] = [_with_reference(rank, calibrations) for rank in record["ranks"]]
            if (launch.allocated_growth or 0.0) <= MOST_GROWTH:  # a growth that was accepted alone has to be known
                for rank in record["ranks"]:
                    rank.pop("allocated_bytes", None)
            launches.append({**record, "environment": shared(record["environment"], environments)})
        document = {
            "schema": SCHEMA,
            "id": self.id,
            "digest": self.digest,
            "machine": self.machine,
            "spec": dict(self.spec),
            "recorded_by": self.recorded_by,
            "anchor": self.anchor.to_dict(),
            "history": [entry.to_dict() for entry in self.history],
            "environments": environments,
            **({"setups": setups} if setups else {}),
            **({"calibrations": calibrations} if calibrations else {}),
            "launches": launches,
            **({"trace": self.trace.to_dict()} if self.trace else {}),
            **({"static": self.static.to_dict()} if self.static else {}),
        }
        try:
            return dump(document)
        except ValueError as error:
            raise BaselineError(f"{self.id}: a figure is not finite ({error}); nothing was recorded") from error

    @classmethod
    def from_json(cls, text: str, source: str) -> Baseline:
        """The baseline in ``text``; ``source`` names it in errors.

        Raises:
            BaselineError: empty, truncated, of a newer schema, or not a baseline.
        """
        document = parse(text, source)
        with refusing(source, "a baseline"):
            environments, setups = document["environments"], document.get("setups", {})
            calibrations = document.get("calibrations", {})
            launches = tuple(_launch_of(launch, environments, setups, calibrations) for launch in document["launches"])
            if not launches or not document["history"]:
                raise ValueError("it holds no launch, or no history")
            if {launch.digest for launch in launches} != {document["digest"]}:
                raise ValueError("its launches are of other settings than its digest")
            same_settings(document)
            for line in (line for launch in launches for line in unusable(launch)):
                raise ValueError(line)
            history = tuple(Accepted.from_dict(entry) for entry in document["history"])
            anchor = Accepted.from_dict(document["anchor"])
            same_anchor(anchor, history)
            same_figures(launches, history)
            return cls(
                **{name: document[name] for name in ("id", "digest", "machine", "recorded_by")},
                spec=dict(document["spec"]),
                launches=launches,
                anchor=anchor,
                history=history,
                trace=StoredTrace.from_dict(trace) if (trace := document.get("trace")) else None,
                static=StoredStep.from_dict(document["static"]) if "static" in document else None,
            )


def _with_reference(rank: Mapping[str, Any], calibrations: dict[str, Any]) -> Mapping[str, Any]:
    calibration = rank.get("calibration")
    return {**rank, "calibration": shared(calibration, calibrations)} if calibration else rank


def _with_calibration(rank: object, calibrations: Mapping[str, Any]) -> object:
    if not isinstance(rank, Mapping) or "calibration" not in rank:
        return rank  # of an old file, or none, which whoever reads the launch says
    key = typed(rank, {"calibration": "str"}, "a rank")["calibration"]
    return {**rank, "calibration": calibrations[key]}


# What a setup tells by name; all else of it is compared as it is.
_TOPICS = dict.fromkeys(
    "config modules dropout buffer_dtypes hooks optimizer torch python step overhead sources".split(),
    "Mapping[str, Any]",
)


def _launch_of(
    values: object, environments: Mapping[str, Any], setups: Mapping[str, Any], calibrations: Mapping[str, Any]
) -> Launch:
    kinds = {"environment": "str", "evidence": "Mapping[str, Any]", "ranks": "tuple[Any, ...]"}
    record = typed(values, kinds, "a launch")
    if "ranks" in record:
        record["ranks"] = [_with_calibration(rank, calibrations) for rank in record["ranks"]]
    evidence = record["evidence"]
    if "setup" in evidence:
        evidence = {**evidence, "setup": typed(setups[evidence["setup"]], _TOPICS, "a setup")}
    return Launch.from_dict({**record, "evidence": evidence, "environment": environments[record["environment"]]})


def size_of(baseline: Baseline) -> str:
    """``3 launches in 2 sessions, provisional``."""
    launches, sessions = len(baseline.launches), baseline.sessions
    counts = f"{launches} {'launch' if launches == 1 else 'launches'} in {sessions} "
    return f"{counts}{'session' if sessions == 1 else 'sessions'}, {baseline.maturity}"


def describe(old: Baseline | None, new: Baseline) -> list[str]:
    """Old, new and anchor side by side, for people."""

    def figures(entry: Accepted) -> str:
        rate, memory = (
            in_sentence(entry.metrics[name], unit) if name in entry.metrics else "-"
            for name, unit in ((RATE, "tokens/s/GPU"), (MEMORY, "bytes"))
        )
        return f"{rate:>23}  {memory:>10}"

    before = old.history[-1] if old else None
    return [f"recorded {new.id} ({size_of(new)})", *side_by_side(before, new.history[-1], new.anchor, figures)]
