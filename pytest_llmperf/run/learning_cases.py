"""What a case learns: its loss curve beside those of the same seeds before, and a small form of it beside the truth."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.acceptance import refuse_injected
from pytest_llmperf.judge.baseline import FEWEST_STEPS, LOSS_CURVES, CurveBaseline, SeedCurve
from pytest_llmperf.judge.store import BaselineError, Store
from pytest_llmperf.judge.trainings import Parity, judge_curve, judge_parity
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.learning import ParityOrder
from pytest_llmperf.records.result import FAILING, OTHER_LEARNING, CaseResult, JudgedCurve, joined_reasons, worst_of
from pytest_llmperf.run.case import Caller, Case
from pytest_llmperf.run.findings import CannotRunError, Concluded
from pytest_llmperf.run.runner import Runner, Turn
from pytest_llmperf.settings.attention import has_fp32
from pytest_llmperf.settings.models import is_dropout
from pytest_llmperf.settings.parallelism import gathered_precision
from pytest_llmperf.settings.registry import plainest, small
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec

#: Of a curve that is recorded, where nobody says how many.
SEEDS = 5

# That numpy knows.
_SEEDS = 2**32

_ACCEPT = '--update-baselines --perf-reason "why"'


class CurveCheck:
    def __init__(self, caller: Caller, runner: Runner, spec: TrainSpec, known: JudgedCurve | None = None) -> None:
        """``known`` is what another test of this run has found. ``BaselineError``: what is stored cannot serve."""
        self._caller, self._runner, self._spec = caller, runner, spec
        self._settings = caller.run.settings
        self._seeds = tuple(spec.seed + number for number in range(caller.terms.loss_curve or SEEDS))
        if self._seeds[-1] >= _SEEDS:
            raise BaselineError(
                f"{spec.id}: seed={spec.seed} leaves no room below 2**32 for the {len(self._seeds)} seeds of a loss "
                "curve; take a smaller one"
            )
        self._store = Store(self._settings.baselines, CurveBaseline)
        self._stored = self._store.load(LOSS_CURVES, spec)
        self._launches: dict[int, Launch] = {}
        self._judged = known
        update, stored = self._settings.update, self._stored
        is_other = stored is None or (stored.steps, stored.seeds) != (spec.steps, self._seeds)
        is_wanted = (update == "new" and stored is None) or (update == "all" and (is_other or self._settings.reason))
        self.is_recorded = known is None and bool(is_wanted)
        """Whether all seeds are trained, and become what is held against."""
        if self.is_recorded:
            self._store.check_writable(LOSS_CURVES, spec)
        elif known is None and stored is not None and stored.steps != spec.steps:
            raise BaselineError(
                f"{self._store.path(LOSS_CURVES, spec)}: its loss curves are of {stored.steps} steps, the spec "
                f"of {spec.id} says {spec.steps}; record them anew with {_ACCEPT}"
            )

    @property
    def launches_more(self) -> int:
        """Beside the case's own, as far as can be foreseen: whether one seed decides is not known beforehand."""
        return len(self._seeds) - 1 if self.is_recorded else 0

    def judged(self, result: CaseResult) -> CaseResult:
        """``result`` with what its losses say; more seeds are trained where one does not decide, or to be recorded."""
        if not result.launches or (result.verdict == "invalid" and self._judged is None):
            return result  # what is no training has no curve
        if self._judged is None:
            self._launches[self._spec.seed] = result.launches[0]
            if wrong := self._trained():
                return replace(result, verdict="invalid", reason=wrong)
        return result if self.is_recorded else self._joined(result)

    def _trained(self) -> str:
        """What contradicts a seed's spec, if anything does."""
        stored = self._stored.losses if self._stored else {}
        seeds = self._seeds if self.is_recorded else tuple(stored) or self._seeds[:1]
        turn = Turn(launches=len(seeds) if self.is_recorded else 0)
        for seed in seeds:
            if seed not in self._launches:
                spec = replace(self._spec, seed=seed)
                launch = self._runner.record(spec, len(self._launches) + 1, turn)
                wrong = validity.troubles(spec, launch, self._caller.terms.inactive)
                if wrong:
                    return joined_reasons(f"seed {seed}: {line}" for line in wrong)
                self._launches[seed] = launch
            if stored and not self.is_recorded:
                self._judged = judge_curve(self._losses, stored)
                if self._judged.verdict != "undecided":
                    break
        return ""

    @property
    def _losses(self) -> dict[int, tuple[float, ...]]:
        # One that drifted was launched again with more steps; its first ones are the same.
        return {seed: tuple(launch.losses[: self._spec.steps]) for seed, launch in self._launches.items()}

    def _joined(self, result: CaseResult) -> CaseResult:
        judged = self._judged
        if judged is None:
            why = f"no loss curve is stored, expected one at {self._store.path(LOSS_CURVES, self._spec)}; record it"
            verdict = worst_of(("new", result.verdict if result.verdict != "planned" else None))
            return replace(result, verdict=verdict, reason=why if verdict == "new" else result.reason)
        told = f"loss curve {judged.verdict}: {judged.reason}"
        result = replace(result, loss_curve=judged)
        if judged.verdict in OTHER_LEARNING:
            before = [f"{result.verdict}: {result.reason}"] if result.verdict in FAILING else []
            reason = joined_reasons([f"{told}, if that was meant accept it with {_ACCEPT}", *before])
            return replace(result, verdict="invalid", reason=reason)
        result = replace(result, notes=(*result.notes, told))
        if judged.verdict == "undecided" and result.verdict == "pass":
            return replace(result, verdict="inconclusive", reason=f"loss curve undecided: {judged.reason}")
        return result

    def recorded(self, result: CaseResult, refused: str) -> tuple[CaseResult, str]:
        """``result`` with the curve that was recorded, if it was to be; and why not."""
        if not self.is_recorded or refused or result.verdict == "invalid":
            return result, refused
        if result.verdict in FAILING and not result.updated:
            return result, f"not recorded: loss curve of {self._spec.id}: its case is {result.verdict}"
        try:
            refuse_injected(self._spec.id, tuple(self._launches.values()))
            path = self._store.replace(self._spec, self._stored, self._new())
        except BaselineError as error:
            return result, f"not recorded: loss curve of {error}"
        steps, seeds = self._spec.steps, self._seeds
        line = f"recorded loss curve of {len(seeds)} seeds, {seeds[0]} to {seeds[-1]}, of {steps} steps: {path}"
        judged = JudgedCurve(verdict="recorded", reason=line, seeds=seeds, stored_seeds=len(seeds))
        lines, stored = [result.updated, line], self._stored
        # What was accepted, though the reason may be of something else.
        if stored is not None and (stored.steps, stored.seeds) == (steps, seeds):
            told = judge_curve(self._losses, stored.losses)
            lines.append(f"  beside the one of {stored.recorded_at[:10]}: {told.verdict}: {told.reason}")
        return replace(result, loss_curve=judged, updated="\n".join(filter(None, lines))), ""

    def _new(self) -> CurveBaseline:
        first, run = self._launches[self._spec.seed], self._caller.run
        return CurveBaseline(
            id=self._spec.id,
            digest=self._spec.digest,
            spec=self._spec.to_dict(),
            recorded_by=self._caller.nodeid,
            recorded_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            curves=tuple(SeedCurve(seed=seed, losses=losses) for seed, losses in self._losses.items()),
            reason=self._settings.reason,
            revision=run.revision.commit,
            device=first.environment.gpu,
            versions=first.environment.versions,
            on_cpu=run.on_cpu,
        )


def asks_for_curve(caller: Caller, spec: Spec) -> bool:
    """Whether a test, or the whole run, asks for it; a run means those cases alone that have something to learn."""
    return bool(caller.terms.loss_curve) or (
        caller.run.settings.loss_curve and isinstance(spec, TrainSpec) and spec.data == "text"
    )


def asked_curve(caller: Caller, runner: Runner, spec: Spec, known: JudgedCurve | None) -> CurveCheck | None:
    """``BaselineError``: there is no curve to judge, or what is stored cannot be used."""
    if not asks_for_curve(caller, spec):
        return None
    if not isinstance(spec, TrainSpec):
        why = "a loss curve takes seeds and texts of ours: ask for none of a script"
    elif spec.data != "text":
        why = 'random tokens have nothing to learn, a loss curve takes data="text": train on one, or '
        why += "ask for no loss curve"
    elif spec.min_steps < spec.steps:
        why = (
            f"a launch may end after min_steps={spec.min_steps} of steps={spec.steps}, a loss curve takes launches of "
        )
        why += f"one length: min_steps={spec.steps}"
    elif spec.steps < FEWEST_STEPS:
        why = f"steps={spec.steps} are too few for a loss curve, expected {FEWEST_STEPS} or more"
    else:
        return CurveCheck(caller, runner, spec, known)
    raise BaselineError(f"{spec.id}: {why}")


def parity(caller: Caller, runner: Runner, case: Case, specs: Sequence[TrainSpec]) -> Concluded:
    """Whether each of ``specs``, small, is no further from the truth than rounding takes its plain form."""
    if not caller.run.site.is_here:
        raise CannotRunError(f"{case.id}: small trainings are launched on this machine alone: --perf-launcher local")
    sides = [(spec, _beside_truth(caller, runner, spec)) for spec in specs]
    troubles = [f"{spec.id}: {line}" if len(sides) > 1 else line for spec, side in sides for line in side.troubles]
    checks = tuple({check.metric: check for _, side in reversed(sides) for check in side.checks}.values())
    notes = dict.fromkeys(note for spec, side in sides for note in (*side.notes, *_notes(spec)))
    parts = [f"{check.metric} {check.value:.1e} of {check.limit:.1e} ({check.detail})" for check in checks]
    reason = joined_reasons(troubles) or f"trains as its plain form does: {', '.join(parts)}"
    result = caller.result(case, "invalid" if troubles else "pass", reason, checks)
    result = replace(result, notes=(*notes, *result.notes))
    return Concluded(result=result, held_against="the plain form in double precision")


def _beside_truth(caller: Caller, runner: Runner, spec: TrainSpec) -> Parity:
    known, few, plain = caller.run.result_cache, small(spec), plainest(spec)
    shrinks = few.sequence_length / spec.sequence_length
    order = ParityOrder(gathered=gathered_precision(spec), shrinks=shrinks)
    truth = known.true_trainings.get((plain.digest, order)) or runner.small_trainings(plain, order)
    known.true_trainings[plain.digest, order] = truth
    key = few.digest, truth.folder
    if key not in known.training_errors:
        order = ParityOrder(truth=truth.folder, shrinks=shrinks)
        known.training_errors[key] = runner.small_trainings(few, order).errors
    return judge_parity(known.training_errors[key], truth.errors)


def _notes(spec: TrainSpec) -> Iterator[str]:
    off = [name for name, value in spec.architecture.config.items() if is_dropout(name, value)]
    if off:
        yield f"the small model has no dropout: {', '.join(off)} is 0 there"
    if not has_fp32(spec):
        yield "flash_attention_2 has no fp32: in fp32 everything else is compared, with attention sdpa"
