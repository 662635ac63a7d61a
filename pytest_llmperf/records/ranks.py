"""What a launch asks of its ranks, and what each leaves, without torch: ``request.json`` in its folder, and what it saw
or why it failed. A launch's record is made of what ranks saw, whoever trained."""

from __future__ import annotations

import fcntl
import json
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

from pytest_llmperf.records.launch import DIARY_FILE, SENSORS_FILE, TURN_FILE, Launch, RankRecord
from pytest_llmperf.records.learning import ParityOrder, RankLearning
from pytest_llmperf.records.steady_state import PassingRanges
from pytest_llmperf.records.trace import UNWANTED, Trace
from pytest_llmperf.records.trace import merged as merged_traces
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.redaction import without_secrets

#: Asks a process of a user's own training what it does. SIGUSR1 may be the script's: to save before SLURM ends it.
ASKS = signal.SIGRTMAX - 5
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a launch's ranks are asked for beside its spec."""

    memory_limit_bytes: int = 0
    """What each rank may hold, where that is less than the card's."""
    passing: PassingRanges | None = None
    """With which step times it passes, so that it may end; ``None``: its median has to be known."""
    all_steps: bool = False
    """Whether it takes all its steps, whatever is known before."""
    trace: bool = True
    """Whether a few steps are traced after those that are timed."""
    inspect: bool = True
    """Whether one step more is looked at in full, for whether training learns."""
    parity: ParityOrder | None = None
    """Which small trainings to make in the place of the one that is measured."""


@dataclass(frozen=True, kw_only=True)
class Request(Asked):
    """Beside what torchrun says in the environment."""

    spec: TrainSpec
    folder: Path
    model_config: Mapping[str, Any]
    calibrations: str = ""
    """The folder of the GPUs' calibrations; empty: none is asked for."""
    recipe: str = "huggingface"
    """Who trains: a module of ``worker/recipes``."""

    def await_turn(self, enter: Callable[[str], None]) -> None:
        """Until the launch before has left the device: so long this one's launcher has the file locked, if there."""
        with suppress(FileNotFoundError), (self.folder / TURN_FILE).open("rb") as file:
            enter("yielding")
            fcntl.flock(file, fcntl.LOCK_SH)
            enter("preparing")

    @classmethod
    def read(cls, folder: Path) -> Request:
        values = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        asked = codec.read(Asked, {one.name: values[one.name] for one in fields(Asked) if one.name in values})
        return cls(**values | vars(asked) | {"spec": TrainSpec.from_dict(values["spec"]), "folder": folder})


class RefusedError(ValueError):
    """A model that cannot be trained as it was asked for: one line with what to write instead."""


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(codec.plain(value)), lasts=False)


def write_failure(folder: Path, rank: int, error: BaseException, kind: str, how: str = "") -> None:
    """Leave the reason of this rank's end; the earliest one written is the root cause, its peers only saw it. A refusal
    is its own line and nothing else. ``how`` is known that memory ran out, where ``error`` does not say so."""
    message, lines = str(error), list[str]()
    if kind != "refused":
        # The first line alone may only announce what the others say; what is cut is no longer known for a secret.
        said = without_secrets(" ".join(filter(None, map(str.strip, message.splitlines()))) or "no message")
        # CUDA's out-of-memory message goes on about allocator settings; the log has it all.
        said = said if len(said) <= _LONGEST_MESSAGE else f"{said[:_LONGEST_MESSAGE]}..."
        message = f"rank {rank}: {type(error).__name__}: {said}"
        lines = "".join(traceback.format_exception(error)).splitlines()
    if how:
        message = f"{message}; taken for a lack of memory: {how}"
    tail = [line for line in lines if line.strip()][-12:]
    failure = {"kind": kind, "message": message, "tail": tail, "time": time.time()}
    write_json(folder / f"failure-{rank}.json", failure)


@dataclass(frozen=True)
class Later:
    """One rank's findings after all that is timed."""

    kernels: Mapping[str, str] = field(default_factory=lambda: {"attention_kernel": "unknown"})
    """Evidence of what operators one more sequence called."""
    trace: Trace = field(default_factory=lambda: Trace(none=UNWANTED))
    learning: RankLearning = field(default_factory=lambda: RankLearning(none=UNWANTED))


@codec.sparse()
@dataclass(frozen=True, kw_only=True)
class Trained:
    """One rank's share of a finished run."""

    record: RankRecord
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...] = ()
    """Of the first steps, before clipping."""
    train_seconds: float
    """From the first step's begin to the end of the last one's work, as the host saw it."""
    parameters: int
    evidence: Mapping[str, Any]
    """But for what is seen ``later``."""
    later: Later = field(default_factory=Later)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank of a user's own training leaves: ranks do not talk to one another."""

    world: int
    """How many ranks there are."""
    trained: Trained
    """Without losses where a backward pass did not begin from one number."""
    trace: Trace
    loaded: Mapping[str, str]


def launch_of(spec: Spec, started_at: str, first: Trained, by_rank: Sequence[Trace], **seen: Any) -> Launch:
    """The record of ``spec``, without what its launcher alone knows; ``first``: rank 0's, ``by_rank``: traces."""
    return Launch(
        spec_id=spec.id,
        digest=spec.digest,
        started_at=started_at,
        wall_seconds=0.0,
        train_seconds=first.train_seconds,
        warmup_steps=spec.warmup_steps,
        parameters=first.parameters,
        losses=first.losses,
        trace=merged_traces(by_rank),
        **seen,
    )


# Ranks need not compile alike: the worst of them counts.
_COUNTS: Mapping[str, Callable[[Iterable[int]], int]] = {
    "compiled_graphs": min,
    **dict.fromkeys(("graph_breaks", "recompilations", "allocator_retries"), max),
}

# Ranks of one training may run on processors of two generations; what that does is seen in the clock.
_OF_THE_HOST = frozenset({"setup.torch.cpu_capability"})


def merged_evidence(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's evidence; what other ranks saw differently is in ``other_ranks``, by name and then by rank."""
    worst = {name: of(seen[name] for seen in by_rank) for name, of in _COUNTS.items() if name in by_rank[0]}
    facts = [dict(codec.flat({name: seen[name] for name in seen if name not in _COUNTS})) for seen in by_rank]
    others: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for seen in facts for name in seen if name not in _OF_THE_HOST):
        first = facts[0].get(name)
        for rank, seen in enumerate(facts):
            own = seen.get(name)
            if own != first and "unknown" not in (own, first):
                others.setdefault(name, {})[str(rank)] = own
    return {**by_rank[0], **worst, **({"other_ranks": others} if others else {})}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one rank wrote down at once."""

    time: float
    steps: tuple[tuple[float, float, float], ...]
    """Seconds of each since the last entry, and of these inside of a loader and of garbage collection."""
    allocated_bytes: int | None
    host_bytes: int
    open_files: int
    threads: int
    written_bytes: int
    waited_seconds: float
    """For a core, since the last entry."""
    peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    computed_seconds: float | None = None
    """By the thread that trains, since the last entry; ``None`` in old ones."""
    grown: Mapping[str, float] | None = None
    """Of the last one: kinds of objects, and where they are, of which a step adds so many; ``None``: nobody counted."""

    @property
    def computed(self) -> float:
        return math.nan if self.computed_seconds is None else self.computed_seconds


@dataclass(frozen=True, kw_only=True)
class Sensed:
    """What the GPUs told at one time: the lowest clock, and all energy so far."""

    time: float
    clock_mhz: float | None
    joules: float | None


def diaries(folder: Path) -> Iterator[list[Entry]]:
    """Those of all ranks in their order; of several processes that had one number, that of the one that trained."""
    for rank in count():
        files = folder.glob(DIARY_FILE.format(rank, "*"))
        found = [[codec.read(Entry, line) for line in _lines(file)] for file in files]
        if not any(entry.steps for entries in found for entry in entries):
            return
        yield max(found, key=lambda entries: sum(len(entry.steps) for entry in entries))


def sensed(folder: Path) -> Iterator[Sensed]:
    """What all GPUs of the first of its hosts told, at each time."""
    for gpus in (line for file in sorted(folder.glob(SENSORS_FILE.format("*")))[:1] for line in _lines(file)):
        known = {name: [gpu[name] for gpu in gpus if gpu[name] is not None] for name in ("time", "clock_mhz", "joules")}
        joules = sum(known["joules"]) if len(known["joules"]) == len(gpus) else None
        yield Sensed(time=max(known["time"]), clock_mhz=min(known["clock_mhz"], default=None), joules=joules)


def _lines(path: Path) -> Iterator[Any]:
    """What each line of ``path`` holds; whoever wrote them was ended, maybe within the last one."""
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
