"""Launch, Environment, Health: what one torchrun of one spec left behind, and its JSON.

A record holds raw values only; every rate is a property derived from them. Bytes and seconds throughout."""

from __future__ import annotations

import math
import os
import time
from calendar import timegm
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from pytest_llmperf.records.calibration import TIME_FORMAT, Calibration, Health, Place, host_of, site_of
from pytest_llmperf.records.learning import OLDER as UNINSPECTED
from pytest_llmperf.records.learning import Learning
from pytest_llmperf.records.steady_state import Steady, find_steady, growth
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.settings.registry import Evidence
from pytest_llmperf.support import codec
from pytest_llmperf.support.redaction import redacted

#: The file of a launch's record, and that of what it has measured as long as its traced steps are not over.
RECORD_FILE, MEASURED_FILE = "launch.json", "measured.json"
#: Locked by the launcher as long as the launch before has not left the device.
TURN_FILE = "turn.lock"
#: That of what one rank of a user's own training saw, and of its environment, which is there before it trains.
SHARE_FILE, ENVIRONMENT_FILE = "share-{}.json", "environment.json"
#: There where steps are taken until its launcher ends it; what each rank writes down then, and what a host's GPUs tell.
SOAK_FILE, DIARY_FILE, SENSORS_FILE = "soak.json", "diary-{}-{}.jsonl", "sensors-{}.jsonl"


def diary_of(folder: Path, rank: int) -> Path | None:
    """Where this process writes what ``rank`` sees; ``None``: the launch in ``folder`` takes a number of steps."""
    return folder / DIARY_FILE.format(rank, os.getpid()) if soak_seconds_of(folder) else None


def soak_seconds_of(folder: Path) -> float:
    """For how long the launch in ``folder`` takes steps until it is ended; 0: it takes a number of them."""
    path = folder / SOAK_FILE
    return float(path.read_text(encoding="utf-8")) if path.exists() else 0.0


#: The folder of the failures of processes that were no ranks: they count where the command itself fails.
NO_RANKS = "no-ranks"
#: Why a record of before traces has none.
OLDER = "recorded before launches were traced"
# Times the median step: of steps that have other numbers of tokens one that takes so long waits for something.
_STALLED = 2.0
# What a launch of a single steady step is worth.
_UNKNOWN = 0.05


@codec.sparse()
@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's share of a launch."""

    rank: int
    host: str
    device: str
    """GPU name and UUID, or the CPU's name."""
    tokens_per_step: int
    """Tokens this rank put through the model in one optimizer step, counted in the batches it saw."""
    step_seconds: tuple[float, ...]
    """Every optimizer step in order, the first one included."""
    peak_reserved_bytes: int
    """What the allocator held at most (on the CPU: resident memory above the start)."""
    peak_allocated_bytes: int
    """What tensors held at most (on the CPU: the same as reserved)."""
    boot: str = ""
    """The kernel's boot id, shortened: machines that are lent or cloned often share one name. Empty in old records."""
    canary: Mapping[str, float] = field(default_factory=dict)
    """What this rank's hardware gave to work that never changes; empty of one rank alone, and in old records."""
    waiting_seconds: tuple[float, ...] = ()
    """Of every step, how long this rank waited for the others: where they add up their tokens, and from its own last
    gradient to the end of the exchange. Empty of one rank alone, where ranks share weights, and in old records."""
    calibration: Calibration | None = None
    """Of its device, of that day; ``None`` where none was asked for, and in old records."""
    real_tokens: tuple[int, ...] = ()
    """Of every step, those of its tokens that were no padding; empty where rows have none, and in old records."""
    allocated_bytes: tuple[int, ...] = ()
    """What tensors held as each step ended; empty where nothing counts them, and in old records."""
    step_tokens: tuple[int, ...] = ()
    """Of every step, where they are not all of as many: ``tokens_per_step`` is their mean then."""
    core_seconds: tuple[float, ...] = ()
    """Of a CPU's cores in the timed steps: for which its threads waited for one, which it and its children had, and
    which anybody had; empty where nobody told, and in old records."""

    def __post_init__(self) -> None:
        for name in ("waiting_seconds", "real_tokens", "allocated_bytes", "step_tokens"):
            told = getattr(self, name)
            if told and len(told) != len(self.step_seconds):
                raise ValueError(f"rank {self.rank} has {name} of other steps than it took")
        if (found := len(self.core_seconds)) not in {0, 3}:
            raise ValueError(f"rank {self.rank} has {found} core_seconds, expected 3 or none")

    @property
    def place(self) -> Place:
        return Place(self.host, self.device, self.boot)

    @property
    def working_seconds(self) -> tuple[float, ...]:
        """Every step without its waiting, as far as that is known."""
        if not self.waiting_seconds:
            return self.step_seconds
        return tuple(step - wait for step, wait in zip(self.step_seconds, self.waiting_seconds, strict=True))


@codec.sparse()
@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a launch ran: what may explain a difference between two launches of one spec."""

    gpu: str
    driver: str
    """GPU driver version; empty on the CPU."""
    versions: Mapping[str, str]
    """Python and the packages that matter, by distribution name; a package that is absent is absent."""
    variables: Mapping[str, str]
    """Environment variables that change speed or memory."""
    platform: str
    loaded: Mapping[str, str] = field(default_factory=dict)
    """What else rank 0's interpreter took in: distributions with their versions, and the executable lines of ``.pth``
    files by their digests. Empty in old records, and of a launch that failed."""

    def __post_init__(self) -> None:
        # Here, since whoever reads one of before secrets were left out must not tell them either.
        object.__setattr__(self, "variables", redacted(self.variables))

    def differences(self, other: Environment) -> tuple[str, ...]:
        """A line for each thing that differs, ``name: mine -> theirs``: hardware, versions, variables, the rest."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in ("gpu", "driver", "platform")]
        for mine, theirs in ((self.versions, other.versions), (self.variables, other.variables)):
            pairs += [(name, mine.get(name, ""), theirs.get(name, "")) for name in sorted({*mine, *theirs})]
        if self.loaded and other.loaded:
            names = sorted({*self.loaded, *other.loaded} - {*self.versions, *other.versions})
            pairs += [(name, self.loaded.get(name, ""), other.loaded.get(name, "")) for name in names]
        return tuple(f"{name}: {own or 'none'} -> {theirs or 'none'}" for name, own, theirs in pairs if own != theirs)


def environment_of(folder: Path) -> Environment | None:
    """That of the launch in ``folder``, as far as it came."""
    return codec.load(Environment, folder / ENVIRONMENT_FILE)


# Variables of exchanges between ranks.
_NET = ("NCCL_", "NVSHMEM_", "GLOO_", "UCX_", "FI_", "RCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_")
#: Evidence of where a scheduler put the ranks.
PLACEMENT = ("slurm_nodes", "slurm_switches")


@codec.sparse("health")
@dataclass(frozen=True, kw_only=True)
class Launch:
    """One completed torchrun of one spec."""

    spec_id: str
    digest: str
    started_at: str
    """UTC, ISO 8601."""
    wall_seconds: float
    """From its request to its end, without the wait for hardware: what the user paid for."""
    train_seconds: float
    """Inside ``Trainer.train``: the chapter's denominator."""
    warmup_steps: int
    """Steps left out of the steady rate at least, the first one included."""
    parameters: int
    losses: tuple[float, ...]
    """Training loss of every step, rank 0's."""
    ranks: tuple[RankRecord, ...]
    evidence: Mapping[str, Any]
    """What was really active: patched modules, kernels, types, flags, as it is stored (see ``seen``)."""
    environment: Environment
    canary: Mapping[str, float] = field(default_factory=dict)
    """What the hardware gave to work that never changes, the slowest rank's (``observe/reference_work.py``)."""
    health: Health = field(default_factory=Health)
    phases: Mapping[str, float] = field(default_factory=dict)
    """Where its seconds went, by the names of ``records/failure.py``: ``wall_seconds``, and the wait before them.
    Empty where nobody told and in old records; baselines keep what is held (``HELD`` there)."""
    trace: Trace = field(default_factory=lambda: Trace(none=OLDER))
    """What a step of it did, by name. Baselines keep one trace, and not each launch's."""
    gradient_norms: tuple[float, ...] = ()
    """Of the first steps, of the whole gradient before it is clipped; empty where losses are scaled and in old ones."""
    learning: Learning = field(default_factory=lambda: Learning(none=UNINSPECTED))
    planned_steps: int = 0
    """How many it might have taken, where it ended before; 0: it took all, or the record is old."""

    def __post_init__(self) -> None:
        if not self.ranks or len({len(rank.step_seconds) for rank in self.ranks}) != 1:
            raise ValueError("its ranks disagree on the number of steps")
        steps = len(self.ranks[0].step_seconds)
        if not 0 <= self.warmup_steps < steps:
            raise ValueError(f"{steps} steps, {self.warmup_steps} of them warm-up")

    @cached_property
    def seen(self) -> Evidence:
        """Its evidence, by setting; what it does not claim is not there."""
        return Evidence.read(self.evidence)

    @property
    def is_script(self) -> bool:
        return "tokens" in self.evidence

    @property
    def is_uneven(self) -> bool:
        """Whether another launch's steps may have other tokens: where they are those of so many documents."""
        return self.is_script or self.evidence.get("data", {}).get("rows") == "padding_free"

    @property
    def sources(self) -> Mapping[str, Any]:
        """The files of the user's project that took part in a script, each with the digest of its content."""
        return dict(self.seen.run.setup.get("sources", {})) if self.is_script else {}

    @property
    def allocated_growth(self) -> float | None:
        """Bytes that a step leaves behind, at least, on the worst rank; ``None`` where nothing counted them."""
        grown = (growth(rank.allocated_bytes[self.warmup_steps :]) for rank in self.ranks)
        return max((each for each in grown if each is not None), default=None)

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Every step, of the slowest rank: the job moves at its pace. Of unequal steps for a mean one's tokens."""
        slowest = (max(times) for times in zip(*(rank.step_seconds for rank in self.ranks), strict=True))
        if not self.step_tokens:
            return tuple(slowest)
        usual = self.tokens_per_step
        return tuple(seconds * usual / own for seconds, own in zip(slowest, self.step_tokens, strict=True))

    @property
    def step_tokens(self) -> tuple[int, ...]:
        """Of every step over all ranks, where they are not all of as many."""
        if not any(rank.step_tokens for rank in self.ranks):
            return ()
        steps = len(self.ranks[0].step_seconds)
        by_rank = (rank.step_tokens or (rank.tokens_per_step,) * steps for rank in self.ranks)
        return tuple(max(1, sum(tokens)) for tokens in zip(*by_rank, strict=True))

    @property
    def steady_step_seconds(self) -> tuple[float, ...]:
        return self.step_seconds[self.steady.start :]

    @cached_property
    def steady(self) -> Steady:
        """Which of its steps count; derived, so that what finds it may improve without new measurements."""
        return find_steady(self.step_seconds, self.warmup_steps)

    def differences(self, other: Launch) -> tuple[str, ...]:
        """Name what may explain a difference from ``other``: environment, power limit, where its ranks were."""
        exchange = len(self.ranks) + len(other.ranks) > 2  # noqa: PLR2004 - each has one: their variables do nothing
        lines = [one for one in self.environment.differences(other.environment) if exchange or not one.startswith(_NET)]
        mine, theirs = self.health.power_limit_watts, other.health.power_limit_watts
        if mine and theirs and mine != theirs:
            lines.append(f"power limit: {mine:.0f} W -> {theirs:.0f} W")
        here, there = self.surroundings, other.surroundings
        both = (name for name in here if name in there and here[name] != there[name])
        return (*lines, *(f"{name}: {here[name]} -> {there[name]}" for name in both))

    @property
    def surroundings(self) -> dict[str, Any]:
        """Where its ranks were, and what the user's environment had set before the launch forced it."""
        placed = {name: self.evidence[name] for name in PLACEMENT if self.evidence.get(name) is not None}
        found = sorted(self.evidence.get("found", {}).items())
        told = {f"found {name}": " ".join(v) if isinstance(v, list) else str(v) for name, v in found}
        return placed | {**self.sources} | told

    @property
    def first_step_seconds(self) -> float:
        """Compilation, autotuning and the allocator's growth: a metric of its own."""
        return self.step_seconds[0]

    @cached_property
    def median_step_seconds(self) -> float:
        """Of unequal steps the mean by their tokens, which is the rate of the sum, without those that stalled."""
        middle = median(self.steady_step_seconds)
        steps = zip(self.step_tokens[self.steady.start :], self.steady_step_seconds, strict=False)
        usual = [(tokens, seconds) for tokens, seconds in steps if seconds <= _STALLED * middle]
        whole = sum(tokens for tokens, _ in usual)
        return math.fsum(tokens * seconds for tokens, seconds in usual) / whole if usual else middle

    @property
    def median_error(self) -> float:
        """Relative standard error of the median within this launch; of few steps, as all but the first one scatter."""
        if math.isfinite(self.steady.error):
            return self.steady.error
        rest = self.step_seconds[1:]
        spread = stdev(rest) / fmean(rest) if len(rest) > 1 else _UNKNOWN
        return spread * math.sqrt(math.pi / 2 / len(self.steady_step_seconds))

    @cached_property
    def host(self) -> str:
        """The machines it ran on: what cools, feeds and drives all their GPUs alike."""
        return host_of(rank.place for rank in self.ranks)

    @property
    def ran(self) -> tuple[float, float]:
        """From its request to its end, in seconds since 1970. It notes when its first rank began, in whole ones."""
        try:
            began = timegm(time.strptime(self.started_at, TIME_FORMAT)) - self.phases.get("start", 0.0)
        except ValueError:  # somebody else's file
            began = 0.0
        return began, began + self.wall_seconds

    @property
    def is_on_a_node(self) -> bool:
        return len({rank.host for rank in self.ranks}) == 1

    @cached_property
    def site(self) -> str:
        """The very hardware it ran on: launches that share it share its quirks."""
        return site_of(rank.place for rank in self.ranks)

    @cached_property
    def session(self) -> str:
        """Site and UTC day: launches that share it share a driver, a temperature and neighbours too."""
        return f"{self.site} on {self.started_at[:10]}"

    @property
    def tokens_per_step(self) -> int:
        return sum(rank.tokens_per_step for rank in self.ranks)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.median_step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / len(self.ranks)

    @property
    def real_share(self) -> float:
        """The share of the tokens that went through the model and were no padding."""
        steps = len(self.step_seconds)
        real = (sum(rank.real_tokens) if rank.real_tokens else rank.tokens_per_step * steps for rank in self.ranks)
        return sum(real) / sum(sum(rank.step_tokens) or rank.tokens_per_step * steps for rank in self.ranks)

    @property
    def peak_reserved_bytes(self) -> int:
        """Of the worst rank; so is what is allocated."""
        return max(rank.peak_reserved_bytes for rank in self.ranks)

    @property
    def peak_allocated_bytes(self) -> int:
        return max(rank.peak_allocated_bytes for rank in self.ranks)
