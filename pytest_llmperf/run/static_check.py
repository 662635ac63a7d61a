"""Cases judged without a GPU (``--perf-static``): what a step does, held against what is stored.

A spec's step is told by fake tensors. A script's small form, a command that the user gave, runs on this machine's
CPU, and nobody times it: figures that are not the stored ones count once a second launch has the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from pytest_llmperf.judge.static_steps import ANYWHERE, Place, StepStore, come_and_gone, judge_step, refuse_unexplained
from pytest_llmperf.judge.store import BaselineError
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.prediction import PredictionError, why_none
from pytest_llmperf.launch.script import small_form
from pytest_llmperf.records.failure import OTHER, Failure, LaunchFailed
from pytest_llmperf.records.result import VERDICTS, CaseResult
from pytest_llmperf.records.trace import COUNTLESS, StaticStep
from pytest_llmperf.run.case import Caller, Case
from pytest_llmperf.run.conclusion import conclude, failures
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError, Concluded
from pytest_llmperf.settings.spec import ScriptSpec, Spec, read_spec

#: What a run that recorded launches may record too: figures of other versions are those that somebody else's runs hold.
BESIDE_LAUNCHES = "beside launches"


class StaticCheck:
    def __init__(
        self, caller: Caller, update: str | None = None, machine: str = "", recorded_by: str | None = None
    ) -> None:
        """What is not said is what the run asks for, the kind of machine that it names, and who calls."""
        self._caller, self._run, settings = caller, caller.run, caller.run.settings
        self._update, kind, by = update or settings.update, machine or settings.machine, recorded_by or caller.nodeid
        self._store = StepStore(settings.baselines, kind, by, on_cpu=caller.run.on_cpu)

    def check(self, spec: Spec) -> Concluded:
        """Hold the step of ``spec`` against what is stored of it, under every machine kind that has the case.
        ``CannotRunError``: nothing can be known of it; ``CaseFailedError``: its baseline, or its small form, fails."""
        case, caller, asked = Case.of(spec), self._caller, self._run.settings.gpus
        caller.name(case)
        if asked and spec.gpus > asked:
            caller.skip(case, f"{spec.id} needs {spec.gpus} GPUs, this run may use {asked} (--gpus)")
        with failures(caller, case):
            places = self._store.places(spec)
            known = [(place, place.stored) for place in places if place.stored is not None]
            stored = {place.machine: there.step for place, there in known}
            step = step_of(caller, spec, stored.values())
            dates = (", ".join(filter(None, [place.kind, there.recorded_at[:10]])) for place, there in known)
            held_against = f"static figures of {'; '.join(dates)}" if stored else "none"
            if isinstance(step, PredictionError):
                # What could be told before and cannot be now is no case that does not concern this gate; where whoever
                # tells has ended, no case is judged any more.
                if step.is_lost:
                    result = caller.result(case, "invalid", str(step).removeprefix(f"{spec.id}: "))
                    return conclude(caller, case, Concluded(result=result, held_against=held_against))
                caller.skip(case, str(step), lost=bool(stored))
            self._run.static_versions = step.versions
            result = self._result(case, step, stored)
            result, refused = self._recorded(spec, result, step, places)
        return conclude(caller, case, Concluded(result=result, held_against=held_against, refused=refused))

    def _result(self, case: Case, step: StaticStep, stored: Mapping[str, StaticStep]) -> CaseResult:
        """As bad as the worst of the places; the others say in a note where they differ."""
        if not (judged := {machine: judge_step(step, known) for machine, known in stored.items()}):
            new = judge_step(step, None)
            return self._caller.result(case, new.verdict, new.reason, new.checks)
        machine = min(judged, key=lambda one: VERDICTS.index(judged[one].verdict))
        judgement, known = judged[machine], stored[machine]
        others = {name: one for name, one in judged.items() if one != judgement}
        reason = f"{machine}: {judgement.reason}" if others else judgement.reason
        result = self._caller.result(case, judgement.verdict, reason, judgement.checks)
        return replace(
            result,
            machine=machine,
            diagnosis="" if judgement.verdict == "pass" else come_and_gone(step, known),
            differences=known.other_versions(step),
            notes=(*result.notes, *(f"{name}: {one.verdict}: {one.reason}" for name, one in others.items())),
        )

    def _recorded(
        self, spec: Spec, result: CaseResult, step: StaticStep, places: Sequence[Place]
    ) -> tuple[CaseResult, str]:
        """``result`` with what was recorded, and why something was not."""
        settings = self._run.settings
        if not (wanted := [place for place in places or [ANYWHERE] if self._wants(place, step)]):
            return result, ""
        revision = self._run.revision
        try:
            if not settings.reason and any(place.stored for place in wanted):
                refuse_unexplained(spec.id, result, revision.changed)
            self._store.record(wanted, spec, step, settings.reason, revision.commit)
        except BaselineError as error:
            return result, f"not recorded: {error}"
        kinds = ", ".join(filter(None, [place.kind for place in wanted]))
        return replace(result, updated=f"recorded {spec.id} (its static figures{kinds and ', ' + kinds})"), ""

    def _wants(self, place: Place, step: StaticStep) -> bool:
        """What is the same is left as it is."""
        if place.stored is None:
            return self._update in ("new", "all", BESIDE_LAUNCHES)
        if self._update == BESIDE_LAUNCHES and place.stored.step.other_versions(step):
            return False
        return self._update in ("all", BESIDE_LAUNCHES) and place.stored.step != step


def record_static(caller: Caller, results: Sequence[CaseResult]) -> list[str]:
    """Record static figures beside what the run has recorded on GPUs; a line for each case of which there are none.
    Once nothing trains any more. Those of other versions stay: a CI machine's need not be a GPU's."""
    run, notes = caller.run, list[str]()
    recorded = _recorded(caller, results)
    if not recorded or run.on_cpu:
        return []
    try:
        run.static_steps.ask(recorded)
    except OSError as error:  # no process, no pipe: the launches are recorded all the same
        return [f"no static figures: {error}"]
    for spec, recorded_by in recorded.items():
        try:
            concluded = StaticCheck(caller, BESIDE_LAUNCHES, run.machine_kind, recorded_by).check(spec)
        except (CannotRunError, CaseFailedError) as error:
            notes.append(f"no static figures: {error}")
            continue
        notes += [f"{spec.id}: {concluded.refused}"] if concluded.refused else []
    return notes


def _recorded(caller: Caller, results: Sequence[CaseResult]) -> dict[Spec, str]:
    """What of ``results`` is in a baseline of launches now, and which test recorded it; no script's, which launches."""
    updated = {result.digest for result in results if result.updated}
    run, found = caller.run, {}
    with suppress(ValueError):
        for baseline in run.store.baselines(run.machine_kind) if updated else ():
            if baseline.digest in updated and not (spec := read_spec(baseline.spec)).is_script:
                found[spec] = baseline.recorded_by
    return found


def step_of(caller: Caller, spec: Spec, stored: Collection[StaticStep]) -> StaticStep | PredictionError:
    """The step of ``spec``, of which these are ``stored``."""
    if isinstance(spec, ScriptSpec):
        return _of_script(caller, spec, stored)
    try:
        caller.run.static_steps.check()
    except PredictionError as error:
        return error
    step = caller.run.static_steps.of(spec)
    if isinstance(step, PredictionError):
        step.is_lost |= bool(stored) and why_none(spec) is None
    return step


def _of_script(caller: Caller, spec: ScriptSpec, stored: Collection[StaticStep]) -> StaticStep | PredictionError:
    if not spec.tiny:
        why = '--perf-static takes a small form of a script: give one for the CPU, e.g. tiny="python train.py --tiny"'
        return PredictionError(f"{spec.id}: {why}", is_lost=bool(stored))
    first = _launched(caller, spec, 1)
    if isinstance(first, PredictionError) or first in stored:
        return first
    second = _launched(caller, spec, 2)
    if isinstance(second, PredictionError) or first == second:
        return second
    one, other = first.counts, second.counts
    name, _ = min({*one.items()} ^ {*other.items()})
    apart = f"{one.get(name, 0):g} and {other.get(name, 0):g} of {name}"
    why = f"its small form does not repeat itself, two launches had {apart} a step; seed= may make it"
    return PredictionError(f"{spec.id}: not claimed: {why}", is_lost=bool(stored))


def _launched(caller: Caller, spec: ScriptSpec, number: int) -> StaticStep | PredictionError:
    run = caller.run
    request = small_form(spec, run.run_folder, run.rootdir, run.launch_seconds)
    with caller.observer.launch(f"{spec.id} small", number, 2) as live:
        try:
            outcome = LocalLauncher().launch(request, live.update)
        finally:
            live.clear()
            caller.findings.spend(launches=1, phases={OTHER: request.meter.seconds})
    if isinstance(outcome, Failure):
        raise LaunchFailed(f"{spec.id}, its small form", outcome)
    if not outcome.trace:
        return PredictionError(f"{spec.id}: not claimed: no trace: {outcome.trace.none}", is_lost=True)
    versions = outcome.environment.versions.items()
    exact = {name: version.partition("+")[0] for name, version in versions if name not in COUNTLESS}
    return StaticStep.of(outcome.trace, {**exact, "tiny": spec.tiny})
