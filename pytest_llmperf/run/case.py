"""Case: what is concluded as one (a spec, two that take turns, the largest micro-batch of one), and who asks for it.

Who asks knows whether a case is launched here. A dry run goes on through a test: it has to know its later specs too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy, Rule
from pytest_llmperf.judge.run_effects import Terms
from pytest_llmperf.records.metrics import MEMORY, METRICS, RATE
from pytest_llmperf.records.result import CaseResult, Check, Reference, Verdict
from pytest_llmperf.records.results_document import Elsewhere, Planned, Skipped
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError, Findings, Observer
from pytest_llmperf.run.run import Run
from pytest_llmperf.settings.registry import missing_package, small, why_skip
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.spec import ScriptSpec, Spec
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec

_DRY = "dry run: nothing is launched"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Its name, its identity and what it launches."""

    id: str
    digest: str
    specs: tuple[Spec, ...]
    baselines: tuple[str, ...] = ()
    """Digests of the baselines that are in use by it."""
    takes: str = ""
    """Why it cannot be told without a launch."""
    needs_memory_limit: bool = False
    """Whether it has to run out of memory to be decided."""
    judges: bool = True
    """Whether it is judged; launches alone are what ``perf.measure`` returns."""
    seconds: float | None = None
    """Of one launch, where they are asked for; ``None``: stored launches tell."""
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """GPUs, or ranks on the CPU, of its widest spec."""
        return max(spec.gpus for spec in self.specs)

    def spec(self, spec_id: str) -> Spec:
        """The one of this id; the last where a launch had another: sizes that are searched have their own."""
        return next((spec for spec in self.specs if spec.id == spec_id), self.specs[-1])

    @classmethod
    def of(cls, spec: Spec) -> Case:
        """One spec against its baseline, or another environment."""
        return cls(id=spec.id, digest=spec.digest, specs=(spec,), baselines=(spec.digest,))

    @classmethod
    def measured(cls, spec: Spec) -> Case:
        return replace(cls.of(spec), judges=False, takes="perf.measure launches, which --perf-static does not")

    @classmethod
    def compared(cls, before: Spec, after: Spec, *notes: str) -> Case:
        return cls(
            id=f"{after.id}-over-{before.id}",
            digest=f"{after.digest}-{before.digest}",
            specs=(before, after),
            baselines=(before.digest, after.digest),
            takes="a ratio takes launches in turns, and --perf-static makes none",
            notes=notes,
        )

    @classmethod
    def largest_batch(cls, spec: Spec) -> Case:
        return cls(
            id=spec.capacity_id,
            digest=spec.capacity_digest,
            specs=(spec,),
            baselines=(spec.capacity_digest,),
            takes="the largest micro-batch is one that trains, and --perf-static launches nothing",
            needs_memory_limit=True,
        )

    @classmethod
    def soaked(cls, spec: Spec, minutes: float) -> Case:
        return cls(
            id=f"{spec.id}-soak",
            digest=f"{spec.digest}-soak",
            specs=(spec,),
            seconds=60 * minutes,
            takes="a soak takes minutes of steps, and --perf-static launches nothing",
        )

    @classmethod
    def same_training(cls, *specs: TrainSpec) -> Case:
        """The last of ``specs`` held beside the others, or its plain form; all of them small."""
        named = [spec.id for spec in specs]
        return cls(
            id=f"{named[-1]}-as-{named[0] if len(named) > 1 else 'plain'}",
            digest="-".join(["parity", *(spec.content for spec in specs)]),
            specs=tuple(map(small, specs)),
            takes="what is learnt takes launches, and --perf-static makes none",
        )

    @classmethod
    def tuned(cls, spec: TrainSpec, space: Space) -> Case:
        return cls(
            id=f"{spec.id}-tuned-over-{'-'.join(axis.name for axis in space.axes)}",
            digest="-".join(["tuned", spec.digest, *(one.digest for one in neighbours(spec, space))]),
            specs=(spec,),
            takes="which is the fastest takes launches in turns, and --perf-static makes none",
        )


def neighbours(spec: TrainSpec, space: Space) -> tuple[TrainSpec, ...]:
    """What differs from ``spec`` by one choice of ``space`` and can be."""
    return tuple(one for one in space.neighbours(spec) if one.digest != spec.digest)


def fewest_launches(asked: int, spec: Spec) -> int:
    """How many launches tell what of ``spec`` is exact, ``asked`` at least: of a script that is seen in two."""
    return max(asked, 2) if spec.is_script else asked


@dataclass(frozen=True, kw_only=True)
class CaseTerms:
    """The terms of a test's markers, or of whoever else asks for a case."""

    rung: str = ""
    reference: Reference | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """By metric."""
    oom_below_gib: float | None = None
    inactive: frozenset[str] = frozenset()
    efficiency: Terms = field(default_factory=Terms)
    parity: bool = False
    """Whether what it trains is held beside its plain form first."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks for cases, a test or a command: on which terms, where findings go, who sees what happens."""

    run: Run
    terms: CaseTerms
    findings: Findings
    observer: Observer
    nodeid: str
    """Its name, in results and baselines."""

    def result(
        self, case: Case, verdict: Verdict | Literal["planned"], reason: str, checks: tuple[Check, ...] = ()
    ) -> CaseResult:
        """The result of ``case``, without the launches that it is about."""
        return CaseResult(
            id=case.id,
            digest=case.digest,
            nodeid=self.nodeid,
            machine=self.run.machine_kind,
            verdict=verdict,
            reason=reason,
            checks=checks,
            notes=case.notes,
            reference=self.terms.reference,
            rung=self.terms.rung,
        )

    def policy(self, spec: Spec) -> Policy:
        """What ``spec`` is judged by: the terms' tolerances, else its own, else the run's, else the machine's. Twice as
        slow may be a CPU's gate; on a GPU 1 was meant as 1 %, and is a ``CaseFailedError``."""
        run = self.run
        rule = Rule.allowing(run.settings.alarms_a_month, run.num_gates, run.settings.max_launches)
        policy = run.stored.policy(rule, run.result_cache.launches)
        of_spec = {RATE: spec.throughput_tolerance, MEMORY: spec.memory_tolerance}
        said = {metric: value for metric, value in of_spec.items() if value is not None}
        for named in (run.settings.tolerances, said, self.terms.tolerances):
            # Who allows more memory means all of it, if not said otherwise.
            also = {row.told_by: named[name] for name, row in METRICS.items() if row.told_by and name in named}
            tolerances = dict(named) | {name: value for name, value in also.items() if name not in named}
            for metric, tolerance in tolerances.items():
                if tolerance >= 1 and not run.on_cpu:
                    raise CaseFailedError(
                        f"{spec.id}: tolerance {metric}={tolerance:g}: on a GPU it must be below 1, e.g. 0.01 for 1 %"
                    )
            policy = policy.merged(tolerances)
        return policy

    @property
    def should_run_out(self) -> bool:
        """Whether the GPUs here have less memory than the case was declared to need."""
        below = self.terms.oom_below_gib
        return below is not None and not self.run.on_cpu and self.run.memory_bytes < below * 2**30

    def need_own_id(self, spec: Spec) -> None:
        """Two commands of one id would be one another's baseline."""
        other = self.run.scripts.setdefault(spec.id, spec) if isinstance(spec, ScriptSpec) else spec
        if isinstance(other, ScriptSpec) and other.digest != spec.digest:
            raise SpecError(
                f"{spec.id} is the id of `{other.command}` and of another command of this run; say name= in one of them"
            )

    def name(self, case: Case) -> None:
        """The baselines of ``case`` are in use, whatever becomes of the test."""
        self.findings.digests += [digest for digest in case.baselines if digest not in self.findings.digests]
        self.findings.named = True

    def ask(self, case: Case, launches: int, baseline: Baseline | None = None, shares: str = "") -> str:
        """Why ``case`` is not launched; empty where it is. A run that launches ends the test here where one of its
        specs cannot run. It costs nothing where it ``shares`` what another test launches."""
        findings = self.findings
        if not self.run.settings.dry_run:
            self.need(case, baseline)
            return ""
        _, hindrance = self._hindrance(case)
        walls = [launch.wall_seconds for launch in baseline.launches] if baseline else []
        planned = Planned(
            id=case.id,
            nodeid=self.nodeid,
            width=case.width,
            launches=launches,
            gpus=0 if self.run.on_cpu else case.width,
            seconds=launches * sum(walls) / len(walls) if walls else case.seconds,
            skipped=hindrance or shares,
            judges=case.judges,
        )
        findings.planned.append(planned)
        if not hindrance or not findings.withheld:
            findings.withheld = hindrance or _DRY
        return hindrance or _DRY

    def need(self, case: Case, baseline: Baseline | None) -> None:
        """End the test here where one of the specs of ``case`` cannot run; a run that launches nothing goes on."""
        if self.run.settings.dry_run:
            return
        elsewhere, hindrance = self._hindrance(case)
        if hindrance:
            lost = baseline is not None and hindrance in map(missing_package, case.specs)
            self.skip(case, hindrance, lost=lost, elsewhere=elsewhere)

    def skip(self, case: Case, why: str, *, lost: bool = False, elsewhere: Elsewhere = "") -> NoReturn:
        """End the test at ``case``, by a ``CannotRunError``. ``lost``: it ran before, as its baseline shows."""
        self.name(case)
        self.findings.stopped = True
        self.findings.skipped.append(
            Skipped(id=case.id, nodeid=self.nodeid, width=case.width, reason=why, lost=lost, elsewhere=elsewhere)
        )
        raise CannotRunError(why)

    def why_not(self, spec: Spec) -> str | None:
        """Why this machine cannot run ``spec``, if it cannot."""
        return why_skip(spec, num_gpus=self.run.num_gpus, num_cores=self.run.machine.cores)

    def _hindrance(self, case: Case) -> tuple[Elsewhere, str]:
        """Say what is of another width, and why the case cannot run here; empty where it can."""
        run = self.run
        elsewhere, why = self._of_another_width(case, run.num_gpus or run.machine.cores)
        if elsewhere:
            return elsewhere, f"{case.id}: {why}"
        found = next(filter(None, map(self.why_not, case.specs)), "")
        if case.needs_memory_limit and not found and not run.memory_bytes:
            found = "a CPU's memory is everybody's: give this run a limit with --perf-memory-limit, e.g. 2GiB"
        return "", found

    def _of_another_width(self, case: Case, most: int) -> tuple[Elsewhere, str]:
        """The same of the width alone. ``most``: so many GPUs, or ranks on the CPU, are here; a job may hold fewer."""
        width, asked = self.run.settings.width, case.width
        if width is None:
            return "", ""
        first = not self.findings.begun and not width.knows(self.nodeid)
        self.findings.begun = True
        if first and asked != width.gpus:
            return "test", f"asks for {asked} GPU(s), and this run is for tests of {width.gpus} (--perf-width)"
        if asked > width.gpus:
            why = f"asked for {asked} GPUs after {width.gpus}, at whose width the test runs: ask for the widest first"
            return "case", why
        if asked > most:
            return "case", f"asks for {asked} GPUs or ranks, and its job has {most}"
        return "", ""
