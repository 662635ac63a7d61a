"""Cases judged without a launch (``--perf-static``): what fake tensors tell of a step, held against what is stored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.gain import Bounds
from pytest_llmperf.judge.static_step_checks import come_and_gone, judge_step, refusal
from pytest_llmperf.judge.step_store import Place, StepStore
from pytest_llmperf.judge.store import BaselineStore, read
from pytest_llmperf.judge.stored_step import ANY_MACHINE, StoredStep
from pytest_llmperf.judge.verdict import Judgement
from pytest_llmperf.launch.prediction import PredictionError, why_none
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import VERDICTS, CaseResult
from pytest_llmperf.records.results_document import Skipped
from pytest_llmperf.records.static_step import StaticStep
from pytest_llmperf.run.caller import Caller, CaseTerms
from pytest_llmperf.run.case import Case
from pytest_llmperf.run.conclusion import Conclusion, Conclusions
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.dry_run import Planner
from pytest_llmperf.run.errors import CannotRunError, CaseFailedError
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.learning_checks import small_case
from pytest_llmperf.run.observer import Observer
from pytest_llmperf.run.tuning.recheck import tuned_case
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec

#: What a run that recorded launches may record too: figures of other versions are those that somebody else's runs hold.
BESIDE_LAUNCHES = "beside launches"


@dataclass(frozen=True)
class _Judged:
    """A place where figures are stored, and what they decide."""

    place: Place
    judgement: Judgement


class StaticChecks:
    """What one test may ask for, or one command, where nothing is launched."""

    def __init__(
        self, caller: Caller, update: str | None = None, machine: str = "", recorded_by: str | None = None
    ) -> None:
        """``update`` is what the run asks for, ``machine`` the kind that it names, and ``recorded_by`` the test that
        calls, where nothing else is said."""
        self._caller, self._context = caller, caller.context
        self._update = update or self._context.settings.update
        self._recorded_by = recorded_by or caller.nodeid
        self._conclusions, self._planner = Conclusions(caller), Planner(caller)
        self._store = StepStore(self._context.settings.baselines, machine or self._context.settings.machine)

    def check(self, spec: TrainSpec, scaled_from: TrainSpec | None = None) -> Conclusion:
        """The step of ``spec`` against what is stored of it, under every machine kind that has the case.

        Raises:
            CannotRunError: fake tensors cannot tell of it.
            CaseFailedError: its baseline cannot be used.
        """
        del scaled_from  # how several GPUs share the work takes launches
        case = Case.of(spec)
        self._planner.name(case)
        asked = self._context.settings.gpus
        if asked and spec.gpus > asked:
            self._skip(case, f"{spec.id} needs {spec.gpus} GPUs, this run may use {asked} (--gpus)")
        with self._conclusions.failures(case):
            places = self._store.places(spec)
            step = self._context.static_steps.of(spec)
            stored = [place for place in places if place.stored is not None]
            if isinstance(step, PredictionError):
                # What could be told before and cannot be now is no case that does not concern this gate; where whoever
                # tells has ended, no case is judged any more, and green would be a lie.
                if step.is_lost or (stored and why_none(spec) is None):
                    result = self._caller.result(case, "invalid", str(step).removeprefix(f"{spec.id}: "))
                    return self._conclusions.conclude(result, _held_against(stored))
                self._skip(case, str(step), lost=bool(stored))
            self._context.static_versions = step.versions
            judged = [_Judged(place, judge_step(step, place.stored.step)) for place in stored if place.stored]
            result = self._result(case, step, judged)
            result, refused = self._recorded(spec, result, step, places)
        return self._conclusions.conclude(result, _held_against(stored), refused)

    def measure(self, spec: TrainSpec) -> tuple[Launch, ...]:
        """Nothing is launched, and whoever asked computes with launches.

        Raises:
            CannotRunError: always.
        """
        self._caller.findings.cut = True
        self._skip(Case.of(spec, judges=False), f"{spec.id}: perf.measure launches, which --perf-static does not")

    def compare(self, before: TrainSpec, after: TrainSpec, bounds: Mapping[str, Bounds]) -> Conclusion:
        """Two rates take launches.

        Raises:
            CannotRunError: always.
        """
        del bounds
        case = Case.compared(before, after)
        self._skip(case, f"{case.id}: a ratio takes launches in turns, and --perf-static makes none")

    def same_training(self, *specs: TrainSpec) -> Conclusion:
        """What is learnt takes training.

        Raises:
            CannotRunError: always.
        """
        case = small_case(*specs)
        self._skip(case, f"{case.id}: what is learnt takes launches, and --perf-static makes none")

    def tune(self, spec: TrainSpec, space: Space, runners_up: int) -> Conclusion:
        """Which is the fastest takes launches.

        Raises:
            CannotRunError: always.
        """
        del runners_up
        case = tuned_case(spec, space)
        self._skip(case, f"{case.id}: which is the fastest takes launches in turns, and --perf-static makes none")

    def max_micro_batch(self, spec: TrainSpec) -> Conclusion:
        """A largest micro-batch has been trained.

        Raises:
            CannotRunError: always.
        """
        case = Case.largest_batch(spec)
        self._skip(case, f"{case.id}: the largest micro-batch is one that trains, and --perf-static launches nothing")

    def _skip(self, case: Case, why: str, *, lost: bool = False) -> NoReturn:
        self._planner.name(case)
        findings = self._caller.findings
        findings.stopped = True
        findings.skipped.append(
            Skipped(id=case.id, nodeid=self._caller.nodeid, width=case.width, reason=why, lost=lost)
        )
        raise CannotRunError(why)

    def _result(self, case: Case, step: StaticStep, judged: Sequence[_Judged]) -> CaseResult:
        """As bad as the worst of the places; the others say in a note where they differ."""
        if not judged:
            new = judge_step(step, None)
            return self._caller.result(case, new.verdict, new.reason, new.checks)
        worst = min(judged, key=lambda one: VERDICTS.index(one.judgement.verdict))
        judgement, place = worst.judgement, worst.place
        others = [one for one in judged if one.judgement != judgement]
        reason = f"{place.machine}: {judgement.reason}" if others else judgement.reason
        result = self._caller.result(case, judgement.verdict, reason, judgement.checks)
        return replace(
            result,
            machine=place.machine,
            diagnosis="" if judgement.verdict == "pass" or not place.stored else come_and_gone(step, place.stored.step),
            differences=place.stored.step.other_versions(step) if place.stored else (),
            notes=(
                *result.notes,
                *(f"{one.place.machine}: {one.judgement.verdict}: {one.judgement.reason}" for one in others),
            ),
        )

    def _recorded(
        self, spec: TrainSpec, result: CaseResult, step: StaticStep, places: Sequence[Place]
    ) -> tuple[CaseResult, str]:
        """``result`` with what was recorded, and why something was not."""
        settings = self._context.settings
        wanted = [place for place in places or [Place(ANY_MACHINE, None)] if self._wants(place, step)]
        if not wanted:
            return result, ""
        refused = refusal(spec.id, result, wanted, self._context.revision, settings.reason)
        if refused:
            return result, f"not recorded: {refused}"
        new = StoredStep(
            step=step,
            recorded_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            reason=settings.reason,
            revision=self._context.revision.commit,
        )
        try:
            for place in wanted:
                self._store.record(place, spec, new, self._recorded_by, on_cpu=self._context.on_cpu)
        except BaselineError as error:
            return result, f"not recorded: {error}"
        kinds = ", ".join(place.machine for place in wanted if place.machine != ANY_MACHINE)
        return replace(result, updated=f"recorded {spec.id} (its static figures{kinds and ', ' + kinds})"), ""

    def _wants(self, place: Place, step: StaticStep) -> bool:
        """Whether this run records there; what is the same is left as it is."""
        if place.stored is None:
            return self._update in ("new", "all", BESIDE_LAUNCHES)
        if self._update == BESIDE_LAUNCHES and place.stored.step.other_versions(step):
            return False
        return self._update in ("all", BESIDE_LAUNCHES) and place.stored.step != step


def _held_against(stored: Sequence[Place]) -> str:
    """``static figures of nvidia-h200-140gib, 2026-11-23``."""
    found = [f"{_where(place)}{place.stored.recorded_at[:10]}" for place in stored if place.stored]
    return f"static figures of {'; '.join(found)}" if found else "none"


def _where(place: Place) -> str:
    return "" if place.machine == ANY_MACHINE else f"{place.machine}, "


# After a run that recorded: the same cases' static figures, told once nothing trains any more.


def record_static(context: Context, results: Sequence[CaseResult], observer: Observer) -> list[str]:
    """Record them beside what the run has recorded on GPUs; a line for each case of which there are none.

    Those of other versions stay: a CI machine's, which holds each change against them, need not be a GPU's.
    """
    recorded = _recorded(context, results)
    if not recorded or context.on_cpu:
        return []
    try:
        context.static_steps.ask(recorded)
    except OSError as error:  # no process, no pipe: the launches are recorded all the same
        return [f"no static figures: {error}"]
    notes = []
    for spec, recorded_by in recorded.items():
        caller = Caller(
            context=context, terms=CaseTerms(), findings=Findings(), observer=observer, nodeid="static figures"
        )
        try:
            concluded = StaticChecks(caller, BESIDE_LAUNCHES, context.machine_kind, recorded_by).check(spec)
        except (CannotRunError, CaseFailedError) as error:
            notes.append(f"no static figures: {error}")
            continue
        notes += [f"{spec.id}: {concluded.refused}"] if concluded.refused else []
    return notes


def _recorded(context: Context, results: Sequence[CaseResult]) -> dict[TrainSpec, str]:
    """What of ``results`` is in a baseline of launches now, and which test recorded it."""
    updated = {result.digest for result in results if result.updated}
    if not updated:
        return {}
    found = {}
    try:
        entries = BaselineStore(context.settings.baselines).entries(context.machine_kind)
        for entry in entries:
            baseline = read(entry.path, Baseline) if entry.digest in updated else None
            if baseline is not None and entry.copy_of is None:
                found[TrainSpec.from_dict(baseline.spec)] = baseline.recorded_by
    except (BaselineError, SpecError):
        return found
    return found
