"""A comparison with a baseline: launches of one spec until they decide, against its baseline or for the first time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.beside_baseline import BesideBaseline, other_steps
from pytest_llmperf.judge.policy import passing_ranges
from pytest_llmperf.judge.verdict import Judgement, is_doubted
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.records.steady_state import PassingRanges, takes_all_steps
from pytest_llmperf.run.case import Caller, Case, fewest_launches
from pytest_llmperf.run.diagnosis import explained, of_steps, waited_for
from pytest_llmperf.run.measured import Scaling, calibrates
from pytest_llmperf.run.runner import LaunchRetry, Runner, Turn
from pytest_llmperf.settings.spec import Spec


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
        circumstances = self._held(baseline).circumstances
        judgement = self._judge(baseline) if self._launches else None
        while judgement is None or (judgement.undecided and len(self._launches) < most):
            number = len(self._launches) + 1
            # Launches that one did not decide, or that disagree, need all they can know.
            all_steps = is_whole or (judgement is not None and is_doubted(judgement))
            launch = self._retry.launch(
                self._spec,
                number,
                partial(circumstances, on_cpu=self._run.on_cpu, named=self._caller.terms.tolerances),
                passing=None if self._launches else passing,
                all_steps=all_steps,
                turn=Turn(launches=fewest),
                calibrates=partial(calibrates, self._caller, self._launches),
            )
            self._launches = (*self._launches, launch)
            judgement = self._judge(baseline) if number >= fewest or self._retry.spoilt else None
        return self._result(judgement, baseline)

    @property
    def disagreement(self) -> str:
        """Where its launches are too far apart for one of them to be right; such ones are not recorded."""
        return self._held(None).disagreement(self._launches)

    def _passing(self, baseline: Baseline, today: str) -> PassingRanges | None:
        # One GPU has no wider case beside it; all cases of a GPU tell each other of it.
        is_known = self._policy.knowledge is not None and self._run.num_gates > 1
        is_shared = (self._run.has_floors and self._run.num_gpus != 1) or is_known
        return passing_ranges(baseline, self._policy, today, is_shared=is_shared)

    def _held(self, baseline: Baseline | None) -> BesideBaseline:
        return BesideBaseline(self._spec, self._launches, baseline, self._policy, self._run.stored)

    def _judge(self, baseline: Baseline | None) -> Judgement:
        held, launches = self._held(baseline), self._launches
        wrong = held.troubles(self._caller.terms.inactive)
        # What is no figure cannot be computed with.
        extra = () if wrong else self._run.model_flops.figures(self._spec, launches)
        judgement = held.judgement((*wrong, *dict.fromkeys(self._retry.spoilt)), extra)
        return self._scaling.joined(judgement, launches, baseline) if self._scaling else judgement

    def _result(self, judgement: Judgement, baseline: Baseline | None) -> CaseResult:
        caller, held = self._caller, self._held(baseline)
        result = caller.result(Case.of(self._spec), judgement.verdict, judgement.reason, judgement.checks)
        other = other_steps(self._launches, baseline) if judgement.verdict != "pass" else ""
        notes = (*filter(None, [other, *self._notes(held)]), *held.of_judgement(judgement, on_cpu=self._run.on_cpu))
        result = held.with_changes(replace(result, launches=self._launches, notes=notes), caller.nodeid)
        return explained(caller, held, result)

    def _notes(self, held: BesideBaseline) -> Iterator[str]:
        launches, baseline = self._launches, held.baseline
        yield from self._retry.notes
        yield from of_steps(held)
        yield from held.of_compilation()
        if self._spec.is_script and (self._caller.terms.parity or self._run.settings.parity):
            yield "parity is not asked of a script: what it learns is its own"
        yield from waited_for(self._caller, launches)
        yield self._scaling.unheld if self._scaling and baseline is None else ""  # else its verdict says so
        yield from held.of_rules()
        yield from self._run.model_flops.notes(self._spec)
        yield held.disagreement(launches)
        if stored := held.disagreement(baseline.launches) if baseline else "":
            yield f"of the baseline's, {stored}: record it anew"
