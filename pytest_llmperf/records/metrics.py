"""Metrics: one row for each, with all that is known of it, in ``metrics.ini``. Nothing else lists their names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import STAND_INS, Check
from pytest_llmperf.support import formats
from pytest_llmperf.support.files import shipped

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
    """The tolerance under the reference's versions and on its kind of GPU, if the reference agrees by it; where that
    does not agree, it gates nothing."""
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


# How a figure is read off launches, by the word of its row.
_OF: Mapping[str, Callable[[Sequence[Launch]], float]] = {
    "rate": lambda runs: pooled_tokens_per_second(runs) / len(runs[0].ranks),
    "tokens": pooled_tokens_per_second,
    "step": pooled_step_seconds,
    "stalls": lambda runs: min(launch.steady.stalls for launch in runs),
    "final loss": lambda runs: runs[-1].losses[-1],
}


def _of(word: str, name: str, phase: str) -> Callable[[Sequence[Launch]], float]:
    """The same, beside the ``least`` that any launch had: of a ``phase``, or of what its record has by the ``name``."""
    if word == "phase":
        return lambda runs: min(launch.phases[phase] for launch in runs)
    return _OF.get(word) or (lambda runs: float(min(getattr(launch, name) for launch in runs)))


def _rows() -> dict[str, Metric]:
    found, rows = dict[str, Metric](), shipped(__file__, "metrics.ini")
    for name in rows.sections():
        words = {key: _value(text) for key, text in rows[name].items()}
        column = {key.removeprefix("column_"): words.pop(key) for key in [*words] if key.startswith("column")}
        if "of" in words:
            words["of"] = _of(words["of"], name, words.get("phase", ""))
        if column:
            words["column"] = Column(column.pop("column"), **column)
        found[name] = Metric(name, **words, detail=_worst_rank if name == MEMORY else None)
    # What stands in the place of the rate is decided as that is, by its tolerances.
    of_the_rate = replace(found[RATE], gpu=None, gpu_elsewhere=None, gpu_paired=None, cpu=None, column=None)
    for name, label in zip(STAND_INS, ("sequences/s/GPU", "steps/s"), strict=True):
        found[name] = replace(of_the_rate, name=name, label=label, unit=label.removesuffix("/GPU"))
    return found


def _value(text: str) -> Any:
    """A number, true, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


METRICS = _rows()


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
