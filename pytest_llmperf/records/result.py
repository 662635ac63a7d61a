"""Check, CaseResult, Spent: what was decided about a case and what it cost; reports show it and files keep it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, get_args

from pytest_llmperf.records.calibration import Place, host_of, site_of
from pytest_llmperf.records.failure import summed, total
from pytest_llmperf.records.launch import Environment, Launch
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.support.codec import Number
from pytest_llmperf.support.formats import in_sentence, percent

#: What stands in the place of a rate where nobody knows the tokens of a step.
STAND_INS = dict.fromkeys(("sequences_per_second_per_gpu", "steps_per_second"), "tokens_per_second_per_gpu")

Verdict = Literal["invalid", "regressed", "new", "inconclusive", "improved", "changed", "pass"]
#: Worst first: a case is as bad as its worst metric.
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
#: In place of one, of a case that a run which launches nothing has asked about.
PLANNED: Literal["planned"] = "planned"
FAILING: frozenset[str] = frozenset[Verdict]({"invalid", "regressed", "new"})


def verdict_fails(verdict: str, *, strict: bool) -> bool:
    """Whether a verdict fails a run; under ``--perf-strict`` all do that somebody would have to look at."""
    return verdict in FAILING or (strict and verdict in ("improved", "inconclusive", "changed"))


# What a user chooses of a training, as changes and histories name it.
_CHOICES = re.compile(
    r"(tokens of each step|parameter_(dtypes|groups)|(config|optimizer|adapters|modules) |(autocast_dtype|attention|"
    r"parallelism|world_size|gradient_checkpointing|optimizer)$)"
)


def is_choice(name: str) -> bool:
    """Whether ``name`` is of what a user chooses: its change is no consequence of another."""
    return bool(_CHOICES.match(name.partition(": ")[0]))


def worst_of(verdicts: Iterable[Verdict | None]) -> Verdict:
    """The worst of ``verdicts``; ``pass`` where none of them gates."""
    return min((verdict or "pass" for verdict in verdicts), key=VERDICTS.index, default="pass")


def left_by_each_step(grown: Mapping[str, float]) -> str:
    """In a line; empty of none."""
    each = ", ".join(f"{number:.3g} {kind}" for kind, number in grown.items())
    return f"each step leaves {each}" if each else ""


def joined_reasons(lines: Iterable[str]) -> str:
    """The reason of an ``invalid`` case: several are separated by ``"; "``, which none of them has inside."""
    return "; ".join(line.replace("; ", ", ") for line in lines)


#: Ends a note that means no fault: the page has it, and the terminal with ``-v``.
USUAL = "usual, no fault"
#: Begins why a first measurement that was to be recorded was not.
NOT_RECORDED = "not recorded: "


@dataclass(frozen=True, kw_only=True)
class Check:
    """One metric of one case against its baseline."""

    metric: str
    """A name of the design: ``tokens_per_second_per_gpu``, ``peak_reserved_bytes``, …"""
    value: Number
    unit: str
    """``tokens/s``, ``s``, ``bytes``, ``1`` …"""
    higher_is_better: bool = False
    """Which way a gating metric gets better; of one that is only shown it says nothing."""
    baseline: Number | None = None
    tolerance: float | None = None
    """Fraction; ``None`` for a metric that is shown and gates nothing."""
    known_tolerance: float | None = None
    """That on hardware of which enough is known, where ``tolerance`` is wider for want of that."""
    limit: Number | None = None
    """The value beyond which the metric counts as regressed."""
    change: float | None = None
    """``value / baseline - 1``."""
    low: float | None = None
    high: float | None = None
    """Between which the change is, nine times in ten, where statistics of launches decided."""
    detectable: float | None = None
    """The smallest change this gate would have seen, as a fraction."""
    by_itself: Number | None = None
    """Of a speed that scatters from host to host unlike others: its loss when nothing changed, at most; a fraction."""
    verdict: Verdict | None = None
    """``None`` for a metric that gates nothing."""
    detail: str = ""

    @property
    def gates(self) -> bool:
        return self.tolerance is not None

    @property
    def is_by_itself(self) -> bool:
        """Whether it is undecided, and its loss no more than it has on other hosts when nothing changed."""
        loss = -(self.change or 0.0) if self.higher_is_better else self.change or 0.0
        return self.verdict == "inconclusive" and self.by_itself is not None and loss <= self.by_itself

    @property
    def sentence(self) -> str:
        """For a reason: the figure, and what it is held against."""
        held = (("baseline", self.baseline), ("limit", self.limit))
        figures = (self.value, self.baseline, self.limit)
        beside = [f"{self.metric} {in_sentence(self.value, self.unit, *figures)}"]
        if self.verdict == "changed" and self.value == self.baseline:
            return f"{beside[0]} as in the baseline, others by name ({self.detail})"
        beside += [f"{word} {in_sentence(value, self.unit, *figures)}" for word, value in held if value is not None]
        told = ", ".join(beside) + ("" if self.change is None else f" ({percent(self.change)})")
        if self.by_itself is None or self.verdict != "inconclusive":
            return told
        where = "within" if self.is_by_itself else "beyond"
        return f"{told}, {where} the {self.by_itself * 100:.1f} % that this case loses elsewhere when nothing changed"

    @property
    def times_slower(self) -> float | None:
        """How many times as much passes, where that is a multiple: a gate against hanging, as speed has on a CPU."""
        return 1 + self.tolerance if self.tolerance is not None and self.tolerance >= 1 else None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A published figure for the same settings, shown beside ours."""

    source: str
    """Where it was published, and of which machine."""
    tokens_per_second_per_gpu: Number | None
    """``None`` where the publication says out of memory."""
    peak_reserved_bytes: Number | None = None


@dataclass(frozen=True, kw_only=True)
class Soak:
    """What one launch of minutes showed of itself."""

    asked_seconds: Number
    seconds: Number
    """For which it took steps, its warm-up included."""
    steps: int
    findings: tuple[str, ...]
    """What became worse meanwhile, or stalled it; a line each."""
    unheld: tuple[str, ...] = ()
    """The same of what is within tolerance, or was not asked of such a machine."""
    series: Mapping[str, tuple[Number | None, ...]] = field(default_factory=dict)
    """By name, in as many parts of that time as fit a picture; ``minutes`` says where each ends."""
    environment: Environment | None = None
    """Where its rank 0 ran."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case: its figures, its verdict and why."""

    id: str
    digest: str
    nodeid: str
    machine: str
    """Machine kind, which keys the baseline together with the digest."""
    verdict: Verdict | Literal["planned"]
    reason: str
    """One line; what the table and the JSON say beside the verdict."""
    checks: tuple[Check, ...] = ()
    launches: tuple[Launch, ...] = ()
    launches_before: tuple[Launch, ...] = ()
    """Of the other side, in the same order, where two sides took turns."""
    changed: tuple[str, ...] = ()
    """What is exact and not as in the baseline, ``name: then -> now``: what was active, what was learnt."""
    differences: tuple[str, ...] = ()
    """What differs between the baseline's environment and this one, ``name: then -> now``."""
    reference: Reference | None = None
    notes: tuple[str, ...] = ()
    """What a reader should know besides the verdict: a launch that was set aside, creep, two speeds."""
    diagnosis: str = ""
    """What the traces of then and now point to; empty where the case does what it did."""
    soak: Soak | None = None
    """Where it was judged against itself."""
    updated: str = ""
    """What was recorded, if anything: the lines an update prints."""
    rung: str = ""
    """The chapter's table, where the case is one of its rungs."""
    shares: str = ""
    """The test of this run whose launches these are, where it asked for the same before."""
    shared_launches: int = 0
    """How many of ``launches``, its first ones, another test of this run has made and tells of too."""

    def fails(self, *, strict: bool, is_over: bool = True) -> bool:
        """Whether it fails a run; under ``--perf-strict`` for all that somebody would have to look at. Speeds that are
        undecided, and nothing else, do not where they scatter so from host to host by themselves (decision 74), nor
        before the run ``is_over``, which judges them once more."""
        unsettled = [check for check in self.checks if check.verdict not in (None, "pass")]
        is_else = self.changed or self.launches_before
        if self.verdict == "inconclusive" and unsettled and not is_else:
            are_speeds = all(check.verdict == "inconclusive" and check.low is not None for check in unsettled)
            strict &= not are_speeds or (is_over and not all(check.is_by_itself for check in unsettled))
        return not self.updated and (verdict_fails(self.verdict, strict=strict) or (strict and bool(self.changed)))

    def check(self, metric: str) -> Check | None:
        """The check of this metric, or of what stands in its place, if the case has one."""
        return next((one for one in self.checks if metric in (one.metric, STAND_INS.get(one.metric))), None)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The cost of launches, failed ones and searches too."""

    launches: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what they went to (``records/failure.py``), of all launches together."""
    gpu_seconds: float = 0.0
    """For which they held GPUs."""

    @property
    def seconds(self) -> float:
        """For which they ran, or waited for hardware."""
        return total(self.phases)

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            launches=self.launches + other.launches,
            phases=summed((self.phases, other.phases)),
            gpu_seconds=self.gpu_seconds + other.gpu_seconds,
        )


# PastLaunch, PastResult: as much of a case's result as its history needs; Candidate: a revision in a history.

#: The verdict of a real run that was watched; its row's file begins with it, and holds it under this name.
OBSERVED = "observed"


@dataclass(frozen=True)
class PastLaunch:
    started_at: str
    """UTC, ISO 8601."""
    step_seconds: float
    """Median of the steady steps, of the slowest rank."""
    median_error: float = 0.0
    """Relative standard error of that within the launch."""
    sm_clock_mhz: Number = 0.0
    """Median while it trained; 0 where nobody told."""
    places: tuple[Place, ...] = ()

    @property
    def host(self) -> str:
        return host_of(self.places)

    @property
    def site(self) -> str:
        return site_of(self.places)


@dataclass(frozen=True, kw_only=True)
class PastResult:
    """One case of one run."""

    run: str
    """What its other cases share, and no other run has."""
    machine: str
    id: str
    digest: str
    nodeid: str
    verdict: str
    launches: tuple[PastLaunch, ...]
    """One at least, in the order of time."""
    tokens_per_step: int
    """Over all ranks; 0 where nobody told."""
    ranks: int
    peak_reserved_bytes: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, packages, CUDA and the driver."""
    revision: str = ""
    """The commit of the project that ran, with a ``+`` where files differed from it; empty where that is not known."""
    project: str = ""
    """Of which project it is; empty where nobody told."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What a traced step is made of, by metric; empty where it was not traced."""
    unfinished: str = ""
    observed: Mapping[str, float] = field(default_factory=dict)
    """Of a real run that was watched: its ``steps``; from the first quarter of them to the last the ``drift`` of their
    time, as a fraction, and bytes that it ``held`` more. Empty of a measurement."""
    calibrations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of its GPUs, by device, each as its file has it; those that cannot be used are left out."""

    @property
    def began(self) -> str:
        return self.launches[0].started_at

    @property
    def step_seconds(self) -> float:
        """The step time of its launches together, where +5 % and -5 % weigh the same."""
        return math.exp(fmean(math.log(launch.step_seconds) for launch in self.launches))

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """``None`` where its tokens were not told."""
        return self.tokens_per_step / self.ranks / self.step_seconds if self.tokens_per_step else None

    @property
    def measurement(self) -> tuple[object, ...]:
        """Which one it is, in whatever file it was found."""
        return self.machine, self.digest, *((launch.started_at, launch.site) for launch in self.launches)


def counts_of(trace: Trace) -> dict[str, float]:
    """What a traced step is made of, by metric: a host's operators, or a device's kernels."""
    return {name: trace.count(name) for name in trace.metrics}


@dataclass(frozen=True)
class Candidate:
    """One of a history; its good end has no parents there."""

    name: str
    """What names it alone: a commit's full hash, or a version."""
    parents: tuple[str, ...] = ()
    """Names of those that it follows; some may be before the history's beginning."""
    subject: str = ""
    """Of the commit; empty of a version."""
    author: str = ""
    date: str = ""
    is_commit: bool = False

    @property
    def shown(self) -> str:
        return self.name[:12] if self.is_commit else self.name

    @property
    def told(self) -> str:
        """The same with what a reader recognises it by."""
        who = ", ".join(filter(None, [self.author, self.date]))
        return " ".join(filter(None, [self.shown, self.subject, f"({who})" if who else ""]))
