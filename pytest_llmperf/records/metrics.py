"""Metrics: one row for each, with all that is known of it. Nothing else lists their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any, Literal

from pytest_llmperf.records.failure import IMPORTS, MODEL, START
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import STAND_INS, Check
from pytest_llmperf.support import formats

Rule = Literal["speed", "confirmed", "exact", "phase", "count", "scaling", ""]
EarlyStop = Literal["median", "settled", "stalls", ""]
#: The two that every case has, and that people look at.
RATE, MEMORY = "tokens_per_second_per_gpu", "peak_reserved_bytes"


@dataclass(frozen=True)
class Column:
    """Where a metric has a column in tables of cases; one that gates has its change beside it."""

    heading: str
    on_page: str = ""
    """Its heading on the page; empty: the same."""
    places: str = "summary page markdown"
    least: float = -math.inf
    """Less is not worth its place."""
    beside: str = ""
    """Another metric, without which it is not shown."""


@dataclass(frozen=True)
class Metric:
    """All that is known of one metric."""

    name: str
    """As files have it; it carries its unit."""
    label: str = ""
    """For people; empty: its name."""
    unit: str = "1"
    is_share: bool = False
    higher_is_better: bool = False
    of: Callable[[Sequence[Launch]], float] | None = None
    """How it is read off launches; ``None`` where it is computed elsewhere."""
    rule: Rule = ""
    """By what it is decided. ``speed``: by the statistics of launches, less what a GPU is known to do; ``scaling``: by
    those of two widths. ``confirmed``: the best of the launches, and never one alone. ``exact``: a loss where all
    launches show it, two where they repeat themselves and else as many as may be. Both are held against the middle one
    of the baseline's launches, of those accepted last where it is exact, and of those accepted with a reason and since
    where a loss was: an odd one that was stored must not move the limit. ``phase``: as ``confirmed``, and only against
    launches that are like it. ``count``: without tolerance. Empty: shown, or decided where it is computed."""
    gpu: float | None = None
    """Tolerance on GPUs that the baseline knows, a fraction; ``None``: it gates only where a user chose one."""
    gpu_elsewhere: float | None = None
    """The same on others, if wider."""
    gpu_paired: float | None = None
    """The same where both sides took turns."""
    cpu: float | None = None
    slack: float = 0.0
    """In its own unit: a smaller change is no change, whatever fraction it is."""
    slack_elsewhere: float = 0.0
    """The same on hardware that the baseline does not know, if wider: what its host does to it is not known either."""
    alike: float | None = None
    """The tolerance under the versions and on the kind of GPU of what it is held against, if that agrees by it; where
    that does not agree, it gates nothing."""
    told_by: str = ""
    """The metric without which a change of this one fails nothing, and is told: it may be chance."""
    whole: bool = False
    """Whether only launches that took all their steps pass: what comes late or seldom may be in the others' rest."""
    early_stop: EarlyStop = ""
    """Why a launch may end early: its ``median`` is known, it is ``settled``, fewer ``stalls`` count. Empty: never."""
    is_raw: bool = False
    """Whether it is a raw value of launches, so that files of every version must agree with theirs."""
    splits: bool = False
    """Whether launches beyond its tolerance, once accepted, take the place of the stored: they are of another kind."""
    of_the_chip: bool = False
    """Whether it is a share of what the chip's datasheet promises, which nothing exceeds."""
    phase: str = ""
    only_cold: bool = False
    """Whether a launch that began warm does not tell of it."""
    evidence: str = ""
    """The name of a count in a launch's evidence; others of rule ``count`` are of a traced step."""
    costly: bool = False
    """Whether one more of a count is a loss, whatever the clock saw."""
    note: str = ""
    """What torch.compile did so many times, where a count is worth a note."""
    detail: Callable[[Sequence[Launch]], str] | None = None
    column: Column | None = None

    def read(self, launches: Sequence[Launch]) -> float:
        """Its value, of one that is read off ``launches``."""
        if self.of is None:
            raise TypeError(f"{self.name} is not read off launches")
        return self.of(launches)

    def check(self, value: float, baseline: float | None = None, **more: Any) -> Check:
        """A check of ``value`` beside ``baseline``; ``more`` are other fields."""
        own = {"metric": self.name, "unit": self.unit, "higher_is_better": self.higher_is_better}
        change = value / baseline - 1 if baseline else None
        return Check(**{**own, "value": value, "baseline": baseline, "change": change, **more})


# Up to here the centre of some launches is their mean; from here on their median, which one outlier cannot move.
MEAN_UP_TO = 2


def centre(values: Sequence[float]) -> float:
    """The mean of up to two, the median of more."""
    return fmean(values) if len(values) <= MEAN_UP_TO else median(values)


def pooled_step_seconds(launches: Sequence[Launch]) -> float:
    """Step time of a measurement, in seconds: the centre of its launches' medians."""
    return math.exp(centre([math.log(launch.median_step_seconds) for launch in launches]))


def pooled_tokens_per_second(launches: Sequence[Launch]) -> float:
    """Throughput over all ranks, in tokens/s."""
    if launches[0].is_uneven:  # whose launches need not take the same tokens
        return math.exp(centre([math.log(launch.tokens_per_second) for launch in launches]))
    return launches[0].tokens_per_step / pooled_step_seconds(launches)


def _worst_rank(launches: Sequence[Launch]) -> str:
    if len(launches[0].ranks) == 1:
        return ""
    told = min(launches, key=lambda launch: launch.peak_reserved_bytes)
    worst = max(told.ranks, key=lambda rank: rank.peak_reserved_bytes)
    return f"worst on rank {worst.rank} of {len(told.ranks)} ({worst.host}, {worst.device})"


_speed = partial(Metric, rule="speed", early_stop="median", splits=True)
_count = partial(Metric, rule="count")
_share = partial(Metric, is_share=True)


def _least(name: str, label: str, **words: Any) -> Metric:
    """The least that any launch had of what its record has by this name."""
    raw = partial(Metric, early_stop="settled", is_raw=True, of=lambda runs: float(min(getattr(x, name) for x in runs)))
    return raw(name, label, **words)


def _phase(name: str, label: str, phase: str, slack: float, *, only_cold: bool = False) -> Metric:
    """A phase of a launch that told how long it was in each. The best launch says what the code takes: file systems are
    cold, hosts busy, and a second launch finds files where the first had to fetch them. What is less than the slack is
    the machine's (docs/explanation/noise.md)."""
    timed = partial(Metric, unit="s", rule="phase", gpu=1.0, cpu=3.0, early_stop="settled", phase=phase)
    return timed(name, label, of=lambda ran: min(one.phases[phase] for one in ran), slack=slack, only_cold=only_cold)


# In the order in which they are shown. Tolerances of GPUs: eight of one host differ by 0.6 % (sd), hosts by 2 %. Of
# CPUs: identical runs spread 20 % and more, twice that beside a busy neighbour, and the resident memory of a small
# process is mostly libraries and allocator: a tight gate would cry wolf every day.
_ROWS = (
    _speed(
        RATE,
        "tokens/s/GPU",
        unit="tokens/s",
        higher_is_better=True,
        of=lambda runs: pooled_tokens_per_second(runs) / len(runs[0].ranks),
        gpu=0.02,
        gpu_elsewhere=0.05,
        gpu_paired=0.01,
        cpu=3.0,
        column=Column("tokens/s/GPU"),
    ),
    _speed("tokens_per_second", "tokens/s", unit="tokens/s", higher_is_better=True, of=pooled_tokens_per_second),
    _speed("step_seconds", "step", unit="s", of=pooled_step_seconds),
    # Kernels compile, caches fill, autotuners try: the best launch says what the code takes.
    _least("first_step_seconds", "first step", unit="s", rule="confirmed", gpu=1.0, cpu=9.0, slack=3.0),
    # A median hides what only some steps lose. A hiccup in one launch is nobody's fault; one in every launch is. The
    # steadiest H200 launch lost nothing, the least steady of 231 six tenths of this. A host that nobody knew took 1.7 %
    # of two launches in a row, and of others next to nothing.
    _share(
        "stall_share",
        "stalls",
        of=lambda runs: min(launch.steady.stalls for launch in runs),
        rule="confirmed",
        gpu=0.02,
        slack=0.01,
        slack_elsewhere=0.02,
        whole=True,
        early_stop="stalls",
    ),
    # The leanest launch says what the code takes: one in three kept 1.3 % more after its compiler had tried kernels,
    # one in two 3.7 %, where a rank still held the buckets of DDP's first step.
    _least(
        MEMORY,
        "peak memory",
        unit="bytes",
        rule="exact",
        gpu=0.01,
        cpu=0.5,
        told_by="peak_allocated_bytes",  # where the allocator puts the same blocks moves it by 1 % and more
        detail=_worst_rank,
        column=Column("memory", on_page="peak memory"),
    ),
    # Of 76 groups of stored launches that are alike, 75 agree to 0.007 % and 3 MiB: how blocks are rounded.
    _least("peak_allocated_bytes", "peak allocated", unit="bytes", rule="exact", gpu=0.01, alike=0.0005, slack=2**23),
    Metric("steps", column=Column("steps", places="summary page")),
    Metric("final_loss", "final loss", of=lambda runs: runs[-1].losses[-1], rule="exact", is_raw=True, splits=True),
    _phase("start_seconds", "start", START, slack=10.0, only_cold=True),
    _phase("imports_seconds", "imports", IMPORTS, slack=15.0, only_cold=True),
    _phase("model_seconds", "model", MODEL, slack=5.0),
    Metric("allocated_growth_bytes", "memory growth a step", unit="bytes", whole=True),
    Metric("first_loss", "first loss"),
    _share("mfu", "MFU", of_the_chip=True, column=Column("MFU")),
    _share("least_memory_traffic", of_the_chip=True),
    _share(
        "scaling_efficiency",
        "scaling efficiency",
        higher_is_better=True,
        rule="scaling",
        column=Column("efficiency", places="summary page"),
    ),
    Metric("speed_up", "speed-up"),
    Metric("global_batch_tokens", "global batch", unit="tokens"),
    Metric(
        "real_tokens_per_second_per_gpu",
        "real tokens",
        unit="tokens/s",
        higher_is_better=True,
        column=Column("real tokens", places="summary"),
    ),
    _share("real_token_share", "no padding"),
    _share("communication_share", "communication", column=Column("communication", places="summary")),
    # What it costs is in the rate, which gates.
    _share("exposed_communication_share", "exposed communication"),
    Metric("data_wait_seconds", "waits for data", unit="s"),
    # Less than that is how long any loader takes.
    _share("data_wait_share", "of a step", column=Column("waits for data", places="summary", least=0.05)),
    Metric("micro_batch_seconds", unit="s"),
    # How many of each kind a traced step has (``records/trace.py`` says which these are).
    _count("kernels_per_step", "kernels a step"),
    # Of a step that was traced its kernels are shown where they moved.
    _count(
        "operators_per_step",
        "operators a step",
        column=Column("operators", places="summary page", beside="predicted_peak_bytes"),
    ),
    _count("copies_per_step", "copies a step", costly=True),
    _count("collectives_per_step", "collectives a step", costly=True),
    _count("collective_bytes_per_step", "bytes of collectives", unit="bytes", costly=True),
    _count("synchronisations_per_step", "synchronisations a step", costly=True),
    _count("graph_breaks", "graph breaks", evidence="graph_breaks", costly=True, note="broke the graph"),
    _count("recompilations", evidence="recompilations", costly=True, note="compiled anew"),
    _count("allocator_retries", "allocator's retries", evidence="allocator_retries", costly=True),
    Metric("flops_per_step", "arithmetic", unit="FLOP", column=Column("arithmetic")),
    Metric(
        "predicted_peak_bytes", "predicted memory", unit="bytes", column=Column("predicted", on_page="predicted memory")
    ),
    Metric("joules_per_token", "energy", unit="J/token", column=Column("energy", places="summary")),
    Metric("max_micro_batch_size", "max micro batch", higher_is_better=True),
    Metric("throughput_ratio", "throughput ratio"),
    Metric("memory_ratio", "memory ratio"),
    Metric("loss_difference", "loss difference", unit="nat"),
    *map(Metric, ("loss_error", "gradient_error", "update_error")),
)

# Each is decided as the rate is, by its tolerances.
_IN_PLACE = [
    partial(replace, _ROWS[0], gpu=None, gpu_elsewhere=None, gpu_paired=None, cpu=None, column=None)(
        name=name, label=label, unit=label.removesuffix("/GPU")
    )
    for name, label in zip(STAND_INS, ("sequences/s/GPU", "steps/s"), strict=True)
]

METRICS: dict[str, Metric] = {row.name: row for row in (*_ROWS, *_IN_PLACE)}


def measured(launches: Sequence[Launch] = ()) -> dict[str, Metric]:
    """Those that every launch has, which a baseline is held against, by the name that a tolerance is of. Of
    ``launches`` whose tokens nobody knows another rate stands in the place of ``RATE``; losses may be unknown too. A
    user's own training may stall, which is noted: an unchanged FSDP2 loop lost 1.5 to 4.6 % of its launches."""
    rules = ("speed", "confirmed", "exact")
    found = {name: row for name, row in METRICS.items() if row.rule in rules and name not in STAND_INS}
    for launch in launches[:1]:
        if (counted := launch.evidence.get("tokens")) in COUNTED:
            found |= {RATE: METRICS[COUNTED[counted]]}
            del found["tokens_per_second"]
        if launch.is_script:
            del found["stall_share"]
    if not all(launch.losses for launch in launches):
        del found["final_loss"]
    return found


def rate_of(launches: Sequence[Launch]) -> str:
    """The name of the rate that ``launches`` have."""
    return measured(launches)[RATE].name


#: What a script's rate is of, by what was counted in its steps.
COUNTED = {"sequences": "sequences_per_second_per_gpu", "unknown": "steps_per_second"}


def phases() -> dict[str, Metric]:
    """Those that not every launch has: its phases."""
    return {name: row for name, row in METRICS.items() if row.rule == "phase"}


def counts() -> dict[str, Metric]:
    """The whole numbers of a step: of a trace first."""
    return {name: row for name, row in METRICS.items() if row.rule == "count"}


def columns(place: str) -> dict[str, Column]:
    """The columns of the table of cases there: ``summary``, ``page`` or ``markdown``."""
    return {name: row.column for name, row in METRICS.items() if row.column and place in row.column.places}


def label(metric: str) -> str:
    """The metric's name in a table; a metric that is not known here keeps its own."""
    row = METRICS.get(metric)
    return (row and row.label) or metric


def formatted(metric: str, value: float | None, unit: str) -> str:
    """A metric's value in the unit a person reads; memory with two decimals, so that a value and its limit differ."""
    row = METRICS.get(metric)
    if row and value is not None and math.isfinite(value) and unit not in formats.BY_UNIT:
        if row.is_share:
            return formats.share(value)
        if not row.unit:
            return f"{value:.3g} {unit}"
    return formats.figure(value, unit)


def cell(metric: str, value: float | None, unit: str) -> str:
    """The same in a column of its own, where memory has one decimal."""
    column = METRICS[metric].column
    if value is not None and column and value < column.least:
        return formats.ABSENT
    return formats.memory(value) if unit == "bytes" else formatted(metric, value, unit)
