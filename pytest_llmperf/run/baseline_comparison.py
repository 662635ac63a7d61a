"""A comparison with a baseline: launches of one spec until they decide, against its baseline or for the first time."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

from pytest_llmperf.analysis.step_difference import ranked, relevant, step_difference
from pytest_llmperf.analysis.step_words import points_to
from pytest_llmperf.analysis.waits import held_up
from pytest_llmperf.judge import learning_checks, validity
from pytest_llmperf.judge.acceptance import creep, nearest_line
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.early_stop import passing_ranges
from pytest_llmperf.judge.exact import changes, count_checks, trace_notes
from pytest_llmperf.judge.gpu_knowledge import FEWEST_CASES
from pytest_llmperf.judge.learning_checks import changed_gradients, first_loss_checks
from pytest_llmperf.judge.noise import disagreement
from pytest_llmperf.judge.phase_checks import PhaseChecks, growth_checks, is_doubted, phase_checks
from pytest_llmperf.judge.validity import Circumstances
from pytest_llmperf.judge.verdict import WAITS, Judgement, Reference, horizon, joined, judge
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.launch_end import PassingRanges, takes_all_steps
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.records.result import USUAL, CaseResult
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.run.caller import Caller
from pytest_llmperf.run.case import Case
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.derived_metrics import Scaling, compiler, figures, stalled, uneven_memory, waits_for_data
from pytest_llmperf.run.launch_retry import LaunchRetry
from pytest_llmperf.run.runner import Runner
from pytest_llmperf.settings.evidence import LEARNING, lost
from pytest_llmperf.settings.train_spec import TrainSpec

# Diagnosis: what a result points to, of two traces and of what else is not as it was.


# Of a line that has to say more.
_MOST_DIFFERENT = 2


def diagnosed(result: CaseResult, before: Trace | None, after: Trace | None, held_up: Sequence[str] = ()) -> CaseResult:
    """``result`` with what its step does that the one before did not, and what fits that best first.

    ``held_up`` says of a rank that the others wait for it: a trace is the mean of all ranks, and does not. As it is
    where one of the two has no trace.
    """
    if not (before and after):
        return replace(result, diagnosis="; ".join(held_up[:1]))
    difference = step_difference(before, after)
    told = [*held_up[:1], points_to(difference)]
    different = relevant((*result.changed, *result.differences), difference)[:_MOST_DIFFERENT]
    if different:
        told.append(f"different: {', '.join(different)}")
    return replace(result, diagnosis="; ".join(told), differences=ranked(result.differences, difference))


#: Of a case whose speed stays undecided.
ONE_SESSION = (
    "its baseline knows one session: record it again on a second night (--update-baselines), best on another host, and "
    "a loss of 5 % is seen"
)

# What spoils a calibration once may be over; what does so twice stays.
_CALIBRATION_TRIES = 2


class BaselineComparison:
    """Of one spec."""

    def __init__(self, caller: Caller, runner: Runner, spec: TrainSpec, launches: tuple[Launch, ...] = ()) -> None:
        """``launches`` are those that another test of this run has made of the same spec."""
        self._caller, self._runner, self._spec = caller, runner, spec
        self._policy = replace(caller.policy(spec), waits=_may_wait(caller.context))
        begun = () if launches else caller.context.job.begun(caller.nodeid, spec.digest)
        self._num_begun = len(begun)
        """What an earlier start of the SLURM job has launched, and not concluded."""
        self._retry = LaunchRetry(caller.observer.say)
        self._launches = launches or begun

    def run(
        self, baseline: Baseline | None, scaling: Scaling | None = None, *, is_recorded: bool = False
    ) -> CaseResult:
        """Launch until there is a verdict; every launch but one that was set aside counts, also an earlier run's.

        ``is_recorded``: what is measured is to become a part of the baseline.

        Raises:
            LaunchFailed: a launch yielded no record.
        """
        settings = self._caller.context.settings
        passing = None if is_recorded or settings.launches > 1 else self._passing(baseline)
        today = datetime.now(timezone.utc).date()
        is_whole = is_recorded or takes_all_steps(self._spec.digest, today, settings.all_steps)
        is_begun = bool(self._num_begun) and len(self._launches) < settings.launches and not self._retry.spoilt
        judgement = self._judge(baseline, scaling) if self._launches and not is_begun else None
        while judgement is None or (judgement.undecided and len(self._launches) < settings.max_launches):
            number = len(self._launches) + 1
            # Launches that one did not decide, or that disagree, need all they can know.
            all_steps = is_whole or (judgement is not None and is_doubted(judgement))
            start = partial(self._start, number, None if self._launches else passing, all_steps)
            around = partial(self._circumstances, baseline)
            self._launches = (*self._launches, self._retry.launch(self._spec, start, around))
            judgement = None
            if number >= settings.launches or self._retry.spoilt:
                judgement = self._judge(baseline, scaling)
            goes_on = judgement is None or (judgement.undecided and number < settings.max_launches)
            if goes_on and not self._retry.spoilt:
                self._keep()
        result = self._caller.result(Case.of(self._spec), judgement.verdict, judgement.reason, judgement.checks)
        result = replace(
            result,
            launches=self._launches,
            changed=self._changed(judgement, baseline) if baseline else (),
            differences=baseline.launches[-1].differences(self._launches[-1]) if baseline else (),
            notes=(
                *self._notes(baseline, scaling),
                *dict.fromkeys(check.detail for check in judgement.checks if check.detail == WAITS),
                *([ONE_SESSION] if baseline and self._is_young(baseline, judgement) else []),
            ),
        )
        if judgement.verdict == "new":
            stored = self._caller.context.stored_baselines
            near = nearest_line(self._spec, self._caller.nodeid, stored, judgement.checks)
            return replace(result, reason="; ".join(filter(None, [result.reason, near])))
        if baseline is None or judgement.verdict == "pass":
            return result
        return self._diagnosed(result, baseline)

    def _changed(self, judgement: Judgement, baseline: Baseline) -> tuple[str, ...]:
        """What nobody may accept without a reason, though it passes."""
        crept = creep(baseline, judgement.checks, self._launches, self._policy.noise)
        return (*changes(self._launches, baseline.explained), *crept)

    def _is_young(self, baseline: Baseline, judgement: Judgement) -> bool:
        """Whether another session of ``baseline`` would have helped its speed to decide; on a CPU that is noise."""
        is_open = any(check.metric == RATE and check.verdict == "inconclusive" for check in judgement.checks)
        return is_open and baseline.sessions == 1 and not self._caller.context.on_cpu

    @property
    def disagreement(self) -> str:
        """A line where its launches are too far apart for one of them to be right; such ones are not recorded."""
        return self._disagreement(self._launches)

    def _passing(self, baseline: Baseline | None) -> PassingRanges | None:
        if baseline is None:
            return None
        context, today = self._caller.context, time.strftime("%Y-%m-%d", time.gmtime())
        # One GPU has no wider case beside it; all cases of a GPU tell each other of it.
        is_shared = (context.has_floors and context.num_gpus != 1) or (
            self._policy.knowledge is not None and context.num_gates > 1
        )
        return passing_ranges(baseline, self._policy, today, is_shared=is_shared)

    def _start(self, number: int, passing: PassingRanges | None, all_steps: bool, spec: TrainSpec) -> Launch | Failure:
        # With more steps than its own it is tried because it drifted.
        passing = passing if spec == self._spec else None
        return self._runner.launch(spec, number, passing=passing, all_steps=all_steps, calibrates=self._calibrates)

    def _calibrates(self, gpus: Sequence[Gpu]) -> bool:
        """Unless launches of the run have tried in vain on one of them: another is not worth its seconds."""
        context = self._caller.context
        if context.on_cpu or not context.settings.calibration:
            return False
        launches = (*context.result_cache.launches, *self._launches)
        ranks = (rank for launch in launches for rank in launch.ranks)
        tries = Counter(rank.place.device for rank in ranks if rank.calibration and rank.calibration.trouble)
        spent = [device for device, count in tries.items() if count >= _CALIBRATION_TRIES]
        if not gpus:  # srun chooses them, and may choose these
            return not spent
        return not any(gpu.uuid.removeprefix("GPU-") in device for gpu in gpus for device in spent)

    def _keep(self) -> None:
        """Launches that decide nothing yet are kept for a start that goes on with them."""
        caller = self._caller
        caller.context.job.begin(caller.nodeid, self._spec.digest, self._launches)

    def _circumstances(self, baseline: Baseline | None, launch: Launch) -> Circumstances:
        is_figure = not _are_unusable([launch])
        policy = self._policy.at([launch], baseline) if baseline and is_figure else self._policy
        # Where throughput gates nothing, its drift spoils nothing.
        tolerance = policy.tolerances.get(RATE, math.inf)
        return validity.circumstances(launch, tolerance, self._caller.context.experience)

    def _judge(self, baseline: Baseline | None, scaling: Scaling | None) -> Judgement:
        inactive = self._caller.terms.inactive
        wrong = contradictions(self._spec, self._launches, inactive)
        now, then = ([each.seen for each in some] for some in (self._launches, baseline.explained if baseline else ()))
        wrong = (*wrong, *lost(self._spec, now, then, inactive))
        if LEARNING not in inactive:
            wrong = (*wrong, *changed_gradients(self._launches, baseline.explained if baseline else ()))
        troubles = (*wrong, *dict.fromkeys(self._retry.spoilt))
        # What is no figure cannot be computed with.
        extra = () if wrong else figures(self._spec, self._launches, self._caller.context.model_flops)
        judgement = judge(self._launches, baseline, self._policy, troubles, extra)
        if judgement.verdict != "invalid":
            judgement = joined(
                judgement, count_checks(self._launches, baseline.trace if baseline else None), undecided=False
            )
            growth = growth_checks(self._launches, baseline.explained if baseline else (), self._policy.rule.budget)
            is_alone = any(check.verdict == "inconclusive" for check in growth)
            judgement = joined(judgement, growth, undecided=is_alone)
            if baseline:
                losses = first_loss_checks(self._launches, baseline.explained, self._spec.gradient_accumulation_steps)
                judgement = joined(judgement, losses, undecided=False)
            phases = self._phase_checks(baseline)
            judgement = joined(judgement, phases.checks, undecided=phases.undecided)
        return scaling.joined(judgement, self._launches, baseline) if scaling else judgement

    def _phase_checks(self, baseline: Baseline | None) -> PhaseChecks:
        return phase_checks(self._launches, Reference.of(baseline) if baseline else None, self._policy)

    def _diagnosed(self, result: CaseResult, baseline: Baseline) -> CaseResult:
        """With what the newest trace does that the stored one did not, and which rank all wait for, if that is new."""
        newest = next((launch.trace for launch in reversed(self._launches) if launch.trace), None)
        slow = self._held_up(self._launches) if not self._held_up(baseline.newest) else ()
        return diagnosed(result, baseline.trace.trace if baseline.trace else None, newest, slow)

    def _held_up(self, launches: Sequence[Launch]) -> tuple[str, ...]:
        # A CPU's ranks share its cores, and take them from one another.
        return () if self._caller.context.on_cpu or _are_unusable(launches) else held_up(launches)

    def _notes(self, baseline: Baseline | None, scaling: Scaling | None) -> tuple[str, ...]:
        """What the verdict does not say of these launches."""
        launches, notes = self._launches, [*self._retry.notes]
        if self._num_begun:
            notes.append(f"{self._num_begun} of its launches ran before the job was requeued")
        notes += filter(None, [unseen(launches)])
        was_bimodal = baseline and any(launch.steady.bimodal for launch in baseline.launches)
        if any(launch.steady.bimodal for launch in launches) and not was_bimodal:
            notes.append(f"step times are bimodal (noise or a periodic task); {USUAL}")
        notes += stalled(launches)
        notes += waits_for_data(launches)
        notes += uneven_memory(launches, self._policy.tolerances.get(MEMORY, math.inf))
        if self._spec.torch_compile and baseline is None:  # else a change is told as such
            notes += compiler(launches)
        notes += self._held_up(launches)
        if scaling and baseline is None:  # else its verdict says so
            notes += filter(None, [scaling.unheld])
        notes += self._phase_checks(baseline).notes
        notes += learning_checks.notes(launches)
        known = (baseline.launches[-1].seen.run.remarks if baseline else None) or ()
        remarks = dict.fromkeys(line for launch in launches for line in launch.seen.run.remarks or ())
        notes += [line for line in remarks if line not in known]
        notes += trace_notes(launches, baseline.trace if baseline else None)
        notes += [f"measured under {fault}" for fault in validity.injected(launches)]
        notes += calibration_troubles(launches)
        stored = self._disagreement(baseline.launches) if baseline else ""
        notes += filter(None, [self._caller.context.model_flops.note(self._spec)])
        notes += filter(None, [self.disagreement, stored and f"of the baseline's, {stored}: record it anew"])
        return tuple(notes)

    def _disagreement(self, launches: Sequence[Launch]) -> str:
        tolerance = self._policy.tolerances.get(RATE)
        if tolerance is None or _are_unusable(launches):
            return ""
        return disagreement(launches, self._policy.noise, tolerance)


def unseen(launches: Sequence[Launch]) -> str:
    """What no launch has seen, as none took all its steps; empty where one did."""
    seen = horizon(launches)[1]
    return f"{seen}: stalls, drift and growth of memory that come later are not judged" if seen else ""


def _may_wait(context: Context) -> bool:
    """Whether a loss may be decided at the run's end: enough cases may be on its GPU by then to tell of that.

    A strict run passes nothing till then, and a recording one accepts no loss without a reason.
    """
    settings = context.settings
    return context.num_gates > FEWEST_CASES and not settings.strict and settings.update in (None, "prune")


def _are_unusable(launches: Sequence[Launch]) -> bool:
    """Whether there is a figure among them with which nothing can be computed."""
    return any(True for launch in launches for _ in validity.unusable(launch))


def calibration_troubles(launches: Sequence[Launch]) -> list[str]:
    """A line for each reason why calibrations that ``launches`` made tell nothing."""
    made = (rank.calibration for launch in launches for rank in launch.ranks if rank.calibration)
    return list(dict.fromkeys(f"its GPU's calibration is not used: {each.trouble}" for each in made if each.trouble))


def contradictions(spec: TrainSpec, launches: tuple[Launch, ...], inactive: frozenset[str]) -> tuple[str, ...]:
    """What in ``launches`` contradicts ``spec``, each line once."""
    lines = (line for launch in launches for line in validity.troubles(spec, launch, inactive=inactive))
    return tuple(dict.fromkeys(lines))
