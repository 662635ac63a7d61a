"""Baseline: the accepted launches, trace and static figures of one spec on one machine kind, and their history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pytest_llmperf.judge import store
from pytest_llmperf.judge.exact import StoredTrace
from pytest_llmperf.judge.repeats import Repeats
from pytest_llmperf.judge.stats import labels
from pytest_llmperf.judge.validity import unusable
from pytest_llmperf.records.failure import HELD
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.steady_state import MOST_GROWTH
from pytest_llmperf.records.trace import StaticStep
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import file_name

# A step without a launch: its static figures, and who accepted them when.

#: In place of a machine kind, of the figures of a case that has no baseline of any.
ANY_MACHINE: Literal["static"] = "static"


@codec.sparse()
@dataclass(frozen=True, kw_only=True)
class StoredStep:
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
class StepBaseline(store.Document):
    """Static figures of a case that has no baseline of any machine kind."""

    static: StoredStep
    machine: Literal["static"] = ANY_MACHINE
    on_cpu: bool = False
    """Whether a run of the cases for the CPU recorded it: one of those for GPUs asks for others."""

    noun: ClassVar[str] = "static figures"

    def check(self) -> None:
        store.same_settings(self.spec, self.digest)


#: Sessions from which on a baseline says how sessions differ.
CALIBRATED_SESSIONS = 3


@codec.sparse()
@dataclass(frozen=True, kw_only=True)
class Baseline(store.Document):
    launches: tuple[Launch, ...]
    anchor: store.Accepted
    history: tuple[store.Accepted, ...]
    """Every acceptance, newest last; the anchor is the first."""
    trace: StoredTrace | None = None
    """Of its newest launch that had one; ``None`` in old files."""
    static: StoredStep | None = None
    """What its step is without a launch, where that was recorded."""
    repeats: Repeats | None = None
    """What of it is exact, of a user's own training."""

    @property
    def sessions(self) -> int:
        """Hosts, or days on one, that its launches are of. A host that was booted anew is known by its GPUs."""
        days = (launch.started_at[:10] for launch in self.launches)
        return len(set(zip(labels(self.launches)["host"], days, strict=True)))

    @property
    def newest(self) -> tuple[Launch, ...]:
        return self.launches[-max(1, self.history[-1].launches) :]

    @property
    def held(self) -> list[tuple[store.Accepted, tuple[Launch, ...]]]:
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
        return self.launches[-max(1, sum(entry.launches for entry in store.since_reason(self.history))) :]

    @property
    def maturity(self) -> str:
        """``provisional``, or ``calibrated`` once three sessions have said how they differ."""
        return "calibrated" if self.sessions >= CALIBRATED_SESSIONS else "provisional"

    noun: ClassVar[str] = "a baseline"
    by_model: ClassVar[bool] = True

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
            record["environment"] = store.shared(record["environment"], environments)
            if "setup" in record["evidence"]:
                record["evidence"]["setup"] = store.shared(record["evidence"]["setup"], setups)
            for rank in record["ranks"]:
                if "calibration" in rank:
                    rank["calibration"] = store.shared(rank["calibration"], calibrations)
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
        store.same_settings(self.spec, self.digest)
        for line in (line for launch in self.launches for line in unusable(launch)):
            raise ValueError(line)
        store.same_anchor(self.anchor, self.history)
        store.same_figures(self.launches, self.history)


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
        found = {**_referred(record, "environment", self.environments)}
        if isinstance(evidence, Mapping) and "setup" in evidence:
            found["evidence"] = _referred(evidence, "setup", self.setups)
            setup = found["evidence"]["setup"]
            for topic in _TOPICS:
                if not isinstance(setup.get(topic, {}), Mapping):
                    raise ValueError(f"{topic} of a setup is {setup[topic]!r}, expected an object")
        if isinstance(ranks, (list, tuple)):
            found["ranks"] = [
                _referred(rank, "calibration", self.calibrations)
                if isinstance(rank, Mapping) and "calibration" in rank
                else rank
                for rank in ranks
            ]
        return codec.read(Launch, found)


def _referred(record: Mapping[str, Any], name: str, shelf: Mapping[str, Any]) -> dict[str, Any]:
    key = record.get(name)
    if not isinstance(key, str) or key not in shelf:
        raise ValueError(f"{name} is {key!r}, expected one of {', '.join(shelf) or 'none'}")
    return {**record, name: shelf[key]}


def size_of(baseline: Baseline) -> str:
    """``3 launches in 2 sessions, provisional``."""
    launches, sessions = len(baseline.launches), baseline.sessions
    counts = f"{launches} {'launch' if launches == 1 else 'launches'} in {sessions} "
    return f"{counts}{'session' if sessions == 1 else 'sessions'}, {baseline.maturity}"


# The largest micro-batch of one spec on one machine kind, and its history.

#: Beside a model's other baselines, in a folder that no search of theirs looks into.
CAPACITY = "capacity"
CAPACITY_METRIC = "max_micro_batch_size"


@dataclass(frozen=True, kw_only=True)
class CapacityBaseline(store.Document):
    anchor: store.Accepted
    history: tuple[store.Accepted, ...]

    @property
    def size(self) -> int:
        """Sequences per rank and forward pass."""
        return int(self.history[-1].metrics[CAPACITY_METRIC])

    noun: ClassVar[str] = "a baseline of a largest micro-batch"
    by_model: ClassVar[bool] = True
    folder: ClassVar[str] = CAPACITY

    @staticmethod
    def case_of(spec: Spec) -> tuple[str, str]:
        return spec.capacity_id, spec.capacity_digest

    def check(self) -> None:
        if not self.history:
            raise ValueError("it holds no history")
        store.same_anchor(self.anchor, self.history)
        size = self.history[-1].metrics.get(CAPACITY_METRIC)
        if not (size or 0.0) >= 1:
            raise ValueError(f"{CAPACITY_METRIC} is {size}, expected 1 or more")


class BaselineStore(store.Store[Baseline]):
    """The baselines under one folder, with the largest micro-batches beside them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, Baseline)
        self.capacities = store.Store(root, CapacityBaseline)

    def machines(self) -> list[str]:
        """The machine kinds that have baselines, sorted."""
        found = (path for pattern in ("*/*/*.json", f"*/*/{CAPACITY}/*.json") for path in self.root.glob(pattern))
        return sorted({path.relative_to(self.root).parts[0] for path in found})

    def baselines(self, machine: str, broken: list[str] | None = None) -> list[Baseline]:
        """Every readable baseline of ``machine``, once; another is told of where it is used, or in ``broken``."""
        found, troubles = list[Baseline](), [] if broken is None else broken
        own = bool(machine) and Path(machine).name == machine  # a name that leads elsewhere is nobody's folder
        for path in sorted((self.root / machine).glob("*/*.json")) if own else ():
            try:
                baseline = store.read(path, Baseline)
                found += [baseline] if baseline is not None and is_named(path, baseline) else []
            except store.BaselineError as error:
                troubles.append(str(error).splitlines()[0])
        return found

    def entries(self, machine: str) -> dict[Path, store.Document]:
        """Every baseline of ``machine``, in the order of their paths; BaselineError: a file that cannot be read."""
        found = dict[Path, store.Document]()
        for path in sorted((self.root / machine).rglob("*.json")):
            kind: type[Baseline | CapacityBaseline] = CapacityBaseline if path.parent.name == CAPACITY else Baseline
            baseline = store.read(path, kind)
            found |= {path: baseline} if baseline is not None and is_named(path, baseline) else {}
        return found


def is_named(path: Path, one: store.Document) -> bool:
    """Whether a file has the name of its case: a copy that somebody left beside it counts for nothing."""
    return path.stem == file_name(one.id)
