"""A comparison with a baseline: launches of one spec until they decide, against its baseline or for the first time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

from pytest_llmperf.analysis.step_difference import points_to, ranked, relevant, step_difference, unseen
from pytest_llmperf.analysis.waits import data_wait, held_up
from pytest_llmperf.judge import validity
from pytest_llmperf.judge.acceptance import FAR_APART, creep, nearest_line
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.exact import changed_evidence, count_checks, told_changes, trace_notes
from pytest_llmperf.judge.policy import Policy, passing_ranges
from pytest_llmperf.judge.repeats import changed_gradients, first_loss_checks
from pytest_llmperf.judge.stats import disagreement
from pytest_llmperf.judge.verdict import (
    NOTED,
    Judgement,
    growth_checks,
    horizon,
    is_doubted,
    joined,
    judge,
    phase_checks,
)
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, METRICS, RATE
from pytest_llmperf.records.result import USUAL, CaseResult, Check
from pytest_llmperf.records.steady_state import PassingRanges, takes_all_steps
from pytest_llmperf.records.trace import COUNTED, Trace, new_places
from pytest_llmperf.run.case import Caller, Case
from pytest_llmperf.run.derived_metrics import first_guess
from pytest_llmperf.run.measured import Scaling
from pytest_llmperf.run.runner import LaunchRetry, Runner, Turn
from pytest_llmperf.settings.compilation import is_compiled
from pytest_llmperf.settings.registry import LEARNING, lost
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.formats import first_n, memory, seconds

#: Of a case whose speed stays undecided.
ONE_SESSION = (
    "its baseline knows one session: record it again on a second night (--update-baselines), best on another host, and "
    "a loss of 5 % is seen"
)

# What spoils a calibration once may be over; what does so twice stays.
_CALIBRATION_TRIES = 2

#: Of a script that was recorded as repeatable, and is not.
LEARN_ANEW = (
    "losses and all else that its recordings had in common are other, of the same command, files and versions: this "
    'script is not as repeatable as they were; learn it anew with --update-baselines --perf-reason "why"'
)


def fewest_launches(asked: int, spec: Spec) -> int:
    """How many launches tell what of ``spec`` is exact, ``asked`` at least: of a script that is seen in two."""
    return max(asked, 2) if spec.is_script else asked


class BaselineComparison:
    """One spec, launched until it is decided."""

    def __init__(
        self, caller: Caller, runner: Runner, spec: Spec, made: Sequence[Launch] = (), scaling: Scaling | None = None
    ) -> None:
        """What was ``made`` are launches of another test of this run, of the same spec."""
        self._caller, self._run, self._spec, self._scaling = caller, caller.run, spec, scaling
        # A strict run passes no loss till its end.
        waits = self._run.judges_later and not self._run.settings.strict
        self._policy = replace(caller.policy(spec), waits=waits)
        self._retry = LaunchRetry(runner, caller.observer.say)
        self._launches = tuple(made)

    def run(self, baseline: Baseline | None, *, is_recorded: bool = False) -> CaseResult:
        """Launch until there is a verdict; every launch but one that was set aside counts, also an earlier run's."""
        settings = self._run.settings
        fewest = fewest_launches(settings.launches, self._spec) if is_recorded else settings.launches
        most = max(fewest, settings.max_launches)
        today = datetime.now(timezone.utc).date()
        passing = None if is_recorded or fewest > 1 or baseline is None else self._passing(baseline, today.isoformat())
        is_whole = is_recorded or takes_all_steps(self._spec.digest, today, settings.all_steps)
        judgement = self._judge(baseline) if self._launches else None
        while judgement is None or (judgement.undecided and len(self._launches) < most):
            number = len(self._launches) + 1
            # Launches that one did not decide, or that disagree, need all they can know.
            all_steps = is_whole or (judgement is not None and is_doubted(judgement))
            launch = self._retry.launch(
                self._spec,
                number,
                partial(self._circumstances, baseline),
                passing=None if self._launches else passing,
                all_steps=all_steps,
                turn=Turn(launches=fewest),
                calibrates=self._calibrates,
            )
            self._launches = (*self._launches, launch)
            judgement = self._judge(baseline) if number >= fewest or self._retry.spoilt else None
        return self._result(judgement, baseline)

    @property
    def disagreement(self) -> str:
        """Where its launches are too far apart for one of them to be right; such ones are not recorded."""
        return self._disagreement(self._launches)

    def _passing(self, baseline: Baseline, today: str) -> PassingRanges | None:
        # One GPU has no wider case beside it; all cases of a GPU tell each other of it.
        is_known = self._policy.knowledge is not None and self._run.num_gates > 1
        is_shared = (self._run.has_floors and self._run.num_gpus != 1) or is_known
        return passing_ranges(baseline, self._policy, today, is_shared=is_shared)

    def _calibrates(self, gpus: Sequence[Gpu]) -> bool:
        """Unless launches of the run have tried in vain on one of them: another is not worth its seconds."""
        run = self._run
        if run.on_cpu or not run.settings.calibration:
            return False
        launches = (*run.result_cache.launches, *self._launches)
        ranks = (rank for launch in launches for rank in launch.ranks)
        tries = Counter(rank.place.device for rank in ranks if rank.calibration and rank.calibration.trouble)
        spent = [device for device, count in tries.items() if count >= _CALIBRATION_TRIES]
        if not gpus:  # srun chooses them, and may choose these
            return not spent
        return not any(gpu.uuid.removeprefix("GPU-") in device for gpu in gpus for device in spent)

    def _circumstances(self, baseline: Baseline | None, launch: Launch) -> validity.Circumstances:
        is_figure = not validity.are_unusable([launch])
        policy = self._policy.at([launch], baseline) if baseline and is_figure else self._policy
        # Where throughput gates nothing, drift spoils nothing; nor does a CPU's, unless somebody named its tolerance.
        is_noise = self._run.on_cpu and RATE not in self._caller.terms.tolerances
        tolerance = math.inf if is_noise else policy.speed_tolerance
        if self._spec.is_script and baseline:  # nor does what its recordings did as well
            tolerance = max(tolerance, *(2 * abs(each.steady.drift) for each in baseline.launches))
        return validity.circumstances(launch, tolerance, self._run.stored.experience)

    def _judge(self, baseline: Baseline | None) -> Judgement:
        spec, launches, inactive = self._spec, self._launches, self._caller.terms.inactive
        explained = baseline.explained if baseline else ()
        wrong = validity.all_troubles(spec, launches, inactive)
        now, then = ([each.seen for each in some] for some in (launches, explained))
        wrong = (*wrong, *(lost(spec, now, then, inactive) if isinstance(spec, TrainSpec) else ()))
        if LEARNING not in inactive:
            wrong = (*wrong, *changed_gradients(launches, explained))
        # What is no figure cannot be computed with.
        extra = () if wrong else self._run.model_flops.figures(spec, launches)
        judgement = judge(launches, baseline, self._policy, (*wrong, *dict.fromkeys(self._retry.spoilt)), extra)
        if judgement.verdict != "invalid":
            growth = growth_checks(launches, explained, self._policy.rule.budget)
            phases = phase_checks(launches, baseline, self._policy)
            losses = first_loss_checks(launches, explained, spec.passes_per_step)
            undecided = phases.undecided or any(check.verdict == "inconclusive" for check in growth)
            judgement = joined(
                judgement, (*self._counts(baseline), *growth, *losses, *phases.checks), undecided=undecided
            )
        return self._scaling.joined(judgement, launches, baseline) if self._scaling else judgement

    def _counts(self, baseline: Baseline | None) -> tuple[Check, ...]:
        """What a step is made of; of a script that repeats nothing of its recordings they show nothing."""
        repeats = baseline.repeats if baseline else None
        checks = count_checks(self._launches, baseline.trace if baseline else None, repeats)
        other = [check for check in checks if check.verdict in ("regressed", "changed")]
        explained, how = baseline.explained if baseline else (), dict[str, Any](verdict="inconclusive")
        if not other_steps(self._launches, baseline):
            if not repeats or not repeats.is_chance(self._launches, explained, are_counts_other=bool(other)):
                return checks
            if changed_evidence(self._launches, explained):  # a file that no rank imports may have set it up otherwise
                return checks
            how["detail"] = LEARN_ANEW
        return tuple(replace(check, **how) if check in other else check for check in checks)

    def _result(self, judgement: Judgement, baseline: Baseline | None) -> CaseResult:
        """Diagnosed by what the newest trace does that the stored one did not, or a rank that all wait for, if new."""
        launches, run = self._launches, self._run
        result = self._caller.result(Case.of(self._spec), judgement.verdict, judgement.reason, judgement.checks)
        waits = dict.fromkeys(check.detail for check in judgement.checks if check.detail in (*NOTED, LEARN_ANEW))
        # Whether another session of the baseline would have helped its speed to decide; on a CPU that is noise.
        is_open = any(check.metric == RATE and check.verdict == "inconclusive" for check in judgement.checks)
        is_young = baseline is not None and is_open and baseline.sessions == 1 and not run.on_cpu
        notes = (*self._notes(baseline), *waits, *([ONE_SESSION] if is_young else []))
        result = replace(result, launches=launches, notes=notes)
        if baseline is not None:
            # What nobody may accept without a reason, though it passes.
            crept = creep(baseline, judgement.checks, launches, self._policy.noise)
            differences = baseline.launches[-1].differences(launches[-1])
            changed = told_changes(launches, baseline.explained, baseline.repeats, *crept)
            result = replace(result, changed=changed, differences=differences)
        newest = next((launch.trace for launch in reversed(launches) if launch.trace), None)
        before = baseline.trace.trace if baseline and baseline.trace else None
        if judgement.verdict in ("new", "pass") and newest and not run.on_cpu:  # whose ranks wait for cores
            told = unseen(step_difference(before or Trace(), newest))
            result = replace(result, notes=(*result.notes, *told))
        if judgement.verdict == "new":
            near = nearest_line(self._spec, self._caller.nodeid, run.stored.baselines, judgement.checks)
            guess = () if run.on_cpu else first_guess(self._spec, run.machine_kind, run.settings.baselines, launches)
            reason = "; ".join(filter(None, [result.reason, near]))
            return replace(result, reason=reason, notes=(*result.notes, *guess))
        if baseline is None or judgement.verdict == "pass":
            return result
        slow = self._held_up(launches) if not self._held_up(baseline.newest) else ()
        return diagnosed(beside_verdict(result, baseline.launches[-1], before), before, newest, slow)

    def _held_up(self, launches: Sequence[Launch]) -> tuple[str, ...]:
        # A CPU's ranks share its cores, and take them from one another.
        return () if self._run.on_cpu or validity.are_unusable(launches) else held_up(launches)

    def _notes(self, baseline: Baseline | None) -> tuple[str, ...]:
        launches, notes = self._launches, [*self._retry.notes]
        notes += steps_notes(launches, baseline, self._policy)
        if baseline is None and isinstance(self._spec, TrainSpec) and is_compiled(self._spec):
            for row in METRICS.values():  # else a change is told as such
                count = max(launch.evidence.get(row.evidence, 0) for launch in launches) if row.note else 0
                notes += [f"torch_compile {row.note} {count} time(s)"] if count else []
        asks = self._caller.terms.parity or self._run.settings.parity
        if self._spec.is_script and asks:
            notes.append("parity is not asked of a script: what it learns is its own")
        notes += self._held_up(launches)
        unheld = self._scaling.unheld if self._scaling and baseline is None else ""  # else its verdict says so
        notes += [
            *filter(None, [unheld]),
            *phase_checks(launches, baseline, self._policy).notes,
            *seen_notes(launches, baseline),
        ]
        usual, said = self._run.stored.usual, baseline.spec if baseline else {}
        for name, metric in (("throughput_tolerance", RATE), ("memory_tolerance", MEMORY)):
            then, now = said.get(name) or usual.tolerances[metric], getattr(self._spec, name) or 0.0
            if baseline and now > then:
                notes.append(f"{name} is {now * 100:g} % here, was {then * 100:g} % when its baseline was recorded")
        stored = self._disagreement(baseline.launches) if baseline else ""
        stored = stored and f"of the baseline's, {stored}: record it anew"
        return tuple(filter(None, [*notes, *self._run.model_flops.notes(self._spec), self.disagreement, stored]))

    def _disagreement(self, launches: Sequence[Launch]) -> str:
        tolerance = self._policy.tolerances.get(RATE)
        if tolerance is None or validity.are_unusable(launches):
            return ""
        return disagreement(launches, self._policy.noise, tolerance)


# Of a step: from here on they are worth a note.
_MOST_STALLED, _NOTABLE_WAIT = 0.01, 0.05
_MOST_DIFFERENT, _MOST_FILES = 2, 3


def steps_notes(launches: Sequence[Launch], baseline: Baseline | None, policy: Policy) -> Iterator[str]:
    """How the steps of ``launches`` went, as far as that is no news of a change."""
    if told := other_steps(launches, baseline):
        yield told
    if seen := horizon(launches)[1]:  # no launch took all its steps
        yield f"{seen}: stalls, drift and growth of memory that come later are not judged"
    slow, fast = (edge((one.median_step_seconds for one in launches), default=1.0) for edge in (max, min))
    if slow > FAR_APART * fast:
        yield f"its launches are {slow / fast:.1f} times apart: steps of {seconds(fast)} and of {seconds(slow)}"
    was_bimodal = baseline and any(launch.steady.bimodal for launch in baseline.launches)
    if any(launch.steady.bimodal for launch in launches) and not was_bimodal:
        yield f"step times are bimodal (noise or a periodic task); {USUAL}"
    stalls = max((launch.steady.stalls for launch in launches), default=0.0)
    if stalls > _MOST_STALLED:
        yield f"slow steps lost {stalls * 100:.1f} % of a launch; the median leaves them out"
    wait = data_wait(launches)
    if wait and wait[1] >= _NOTABLE_WAIT:
        yield f"waits for data: {wait[0] * 1000:.3g} ms a step ({wait[1] * 100:.0f} % of it)"
    least, most = (choose(launch.peak_reserved_bytes for launch in launches) for choose in (min, max))
    if most > least * (1 + policy.tolerances.get(MEMORY, math.inf)):
        yield f"peak memory of its launches: {memory(least, 2)} to {memory(most, 2)}; the leanest counts"


def other_steps(launches: Sequence[Launch], baseline: Baseline | None) -> str:
    """That the steps of a script that were traced are others than in its baseline, where they lie behind others."""
    then, now = (len(those[-1].step_seconds) for those in (baseline.launches if baseline else launches, launches))
    if then == now or not launches[-1].is_script:
        return ""
    told = f"recorded at steps={then}, judged at steps={now}: the traced steps are others, and may log or evaluate"
    return f'{told}; take steps={then}, or accept this with --update-baselines --perf-reason "why"'


def seen_notes(launches: Sequence[Launch], baseline: Baseline | None) -> Iterator[str]:
    """What else was seen: of learning, by libraries, in traces, of faults and calibrations."""
    yield from validity.notes(launches)
    known = (baseline.launches[-1].seen.run.remarks if baseline else None) or ()
    remarks = dict.fromkeys(line for launch in launches for line in launch.seen.run.remarks or ())
    yield from (line for line in remarks if line not in known)
    if launches[-1].is_script:
        told, then = (
            [*validity.disagreements(one.evidence, one.seen)] if one else []
            for one in (launches[-1], baseline.launches[-1] if baseline else None)
        )
        yield from [line for line in told if line not in then][:_MOST_DIFFERENT]
    yield from trace_notes(launches, baseline.trace if baseline else None)
    yield from (f"measured under {fault}" for fault in validity.injected(launches))
    made = (rank.calibration for launch in launches for rank in launch.ranks if rank.calibration)
    yield from dict.fromkeys(f"its GPU's calibration is not used: {each.trouble}" for each in made if each.trouble)


def beside_verdict(result: CaseResult, stored: Launch, before: Trace | None) -> CaseResult:
    """``result`` of a script that does not hold, with the lines that wait or copy anew and the files that are other."""
    newest = result.launches[-1]
    if not newest.is_script or result.verdict == "pass":
        return result
    moved = [check.metric for check in result.checks if check.metric in COUNTED and check.verdict not in (None, "pass")]
    words = []
    if before and newest.trace:
        words = [place for metric in moved for place in new_places(metric, before, newest.trace)]
    then, now = stored.sources, newest.sources
    files = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    words = [*words[:_MOST_DIFFERENT], *([f"different: {first_n(files, _MOST_FILES)}"] if files else [])]
    return replace(result, reason="; ".join([result.reason, *words]))


def diagnosed(result: CaseResult, before: Trace | None, after: Trace | None, held_up: Sequence[str] = ()) -> CaseResult:
    """``result`` with what its step does that the one before did not, and what fits that best first. ``held_up`` says
    of a rank that the others wait for it: a trace is the mean of all ranks, and does not."""
    if not (before and after):
        return replace(result, diagnosis="; ".join(held_up[:1]))
    difference = step_difference(before, after)
    lost = {check.metric for check in result.checks if check.verdict not in (None, "pass")}
    of_speed = any(name in lost and row.rule == "speed" for name, row in METRICS.items())
    told = [*held_up[:1], points_to(difference, of_speed=of_speed)]
    different = relevant((*result.changed, *result.differences), difference)[:_MOST_DIFFERENT]
    if different:
        told.append(f"different: {', '.join(different)}")
    return replace(result, diagnosis="; ".join(told), differences=ranked(result.differences, difference))
