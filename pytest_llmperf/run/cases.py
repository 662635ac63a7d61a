"""The cases of one caller: each launched until it is decided, and concluded.

What pytest's ``perf`` fixture and ``llmperf check`` ask. ``CannotRunError`` says that a case cannot run here,
``CaseFailedError`` that its baseline cannot be used, ``DidNotTrainError`` that a launch yielded no record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from pytest_llmperf.judge.baseline import Baseline, size_of
from pytest_llmperf.judge.gain import Bounds
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import PLANNED, CaseResult
from pytest_llmperf.run import plan
from pytest_llmperf.run.baseline_comparison import BaselineComparison, fewest_launches
from pytest_llmperf.run.capacity import LAUNCHES, MaxBatchSize
from pytest_llmperf.run.case import Caller, Case, neighbours
from pytest_llmperf.run.conclusion import Recorder, conclude, earlier, failures
from pytest_llmperf.run.derived_metrics import Scaling
from pytest_llmperf.run.errors import CannotRunError, CaseFailedError
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.run.launch_retry import runs_out, should_run_out
from pytest_llmperf.run.learning_cases import CurveCheck, asked_curve, asks_for_curve, parity
from pytest_llmperf.run.paired_comparison import PairedComparison
from pytest_llmperf.run.result_cache import Measured
from pytest_llmperf.run.runner import Runner
from pytest_llmperf.run.static_check import StaticCheck
from pytest_llmperf.run.tuning.recheck import Recheck
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec


class Cases:
    """The cases that one test may ask for, or one command."""

    def __init__(self, caller: Caller) -> None:
        self._caller, self._run, self._settings = caller, caller.run, caller.run.settings
        self._recorder, self._runner = Recorder(caller), Runner(caller)

    def measure(self, spec: Spec) -> tuple[Launch, ...]:
        """As many launches of ``spec`` as the run asks for; where nothing is launched, there is no going on without."""
        case, wanted, findings = Case.measured(spec), self._settings.launches, self._caller.findings
        if self._settings.static:
            findings.cut = True
        self._need_launches(case)
        withheld = plan.ask(self._caller, case, wanted)
        if withheld:
            findings.cut = True
            raise CannotRunError(withheld)
        with failures(self._caller, case):
            return tuple(self._runner.record(spec, number) for number in range(1, wanted + 1))

    def check(self, spec: Spec, scaled_from: Spec | None = None) -> Concluded:
        """Hold ``spec`` against its baseline, or under ``--perf-against`` against another environment."""
        case = Case.of(spec)
        if self._settings.static:  # how several GPUs share the work takes launches
            return StaticCheck(self._caller).check(spec)
        if (differs := self._differs_from_plain(spec)) is not None:
            return differs
        if (concluded := self._earlier(case)) is not None:
            self._run.result_cache.add(Measured(spec, concluded.result, self._recorder.find(spec)))
            return concluded
        with failures(self._caller, case):
            how = self._against if self._settings.against else self._beside_baseline
            return how(case, spec, scaled_from)

    def _beside_baseline(self, case: Case, spec: Spec, scaled_from: Spec | None) -> Concluded:
        cache = self._run.result_cache
        same = cache.same(spec)
        # By another test it may be recorded by now; a broken file is told before it costs GPU time.
        baseline = same.baseline if same else self._recorder.load(spec)
        fails = should_run_out(self._caller)
        known = same.result.loss_curve if same else None
        curve = None if fails else asked_curve(self._caller, self._runner, spec, known)
        shares = f"{spec.id}: shares the launches of {same.nodeid}" if same else ""
        asked, is_recorded = self._settings.launches, self._recorder.wants(baseline)
        fewest = fewest_launches(asked, spec) if is_recorded else asked
        launches = 1 if fails else fewest + (curve.launches_more if curve else 0)
        withheld = plan.ask(self._caller, case, launches, baseline, shares)
        if withheld:
            planned = self._caller.result(case, PLANNED, withheld)
            cache.add(Measured(spec, planned, baseline))
            return Concluded(result=planned)
        if not same:
            self._recorder.prepare(spec, baseline)
        if fails:
            made = Concluded(result=runs_out(self._caller, self._runner, spec))
            return conclude(self._caller, case, made)
        measured = self._measured(spec, scaled_from, baseline, same, curve)
        cache.add(measured)
        held_against = size_of(measured.baseline) if measured.baseline else "none"
        made = Concluded(result=measured.result, held_against=held_against, refused=measured.refused)
        return conclude(self._caller, case, made)

    def _measured(
        self,
        spec: Spec,
        scaled_from: Spec | None,
        baseline: Baseline | None,
        same: Measured | None,
        curve: CurveCheck | None,
    ) -> Measured:
        """``spec`` against ``baseline`` and ``curve``, and what was recorded of it."""
        scaling = Scaling.of(self._caller, self._recorder, spec, scaled_from)
        launches = same.result.launches if same else ()
        comparison = BaselineComparison(self._caller, self._runner, spec, launches, scaling)
        is_recorded = self._recorder.wants(baseline)

        def judge(baseline: Baseline | None) -> CaseResult:
            result = comparison.run(baseline, is_recorded=is_recorded)
            return curve.judged(result) if curve else result

        def record(result: CaseResult, baseline: Baseline | None) -> CaseResult:
            return self._recorder.record(spec, result, baseline, comparison.disagreement)

        result = judge(baseline)
        if same:
            result, refused = same.lent(result)
        else:
            result, baseline, refused = self._recorder.recorded(result, baseline, judge, record)
        if curve:
            result, refused = curve.recorded(result, refused)
        return Measured(spec, result, baseline, refused)

    def compare(self, before: Spec, after: Spec, bounds: Mapping[str, Bounds]) -> Concluded:
        """Measure what ``after`` brings over ``before``, in turns on the same GPUs."""
        alone = (
            ["compared in this environment alone: --perf-against holds perf.check"] if self._settings.against else []
        )
        case = Case.compared(before, after, *alone)
        return self._concluded(case, 2 * self._settings.launches, partial(self._gain, case, bounds))

    def _gain(self, case: Case, bounds: Mapping[str, Bounds]) -> Concluded:
        return PairedComparison(self._caller, self._runner, case.specs[-1]).gain(case, bounds)

    def same_training(self, *specs: TrainSpec) -> Concluded:
        """Whether the last of ``specs`` learns what the one before it does, or what its plain form does if it is alone.

        Small trainings are launched on this machine alone.
        """
        case = Case.same_training(*specs)
        return self._concluded(case, len(specs) + 1, partial(parity, self._caller, self._runner, case, specs))

    def tune(self, spec: TrainSpec, space: Space, runners_up: int) -> Concluded:
        """Whether ``spec`` still is the fastest of its neighbours in ``space``, which take turns with it."""
        case, recheck = Case.tuned(spec, space), Recheck(self._caller, runners_up)
        launches = 2 * min(runners_up, len(neighbours(spec, space)))
        return self._concluded(case, launches, partial(recheck.check, case, spec, space))

    def max_micro_batch(self, spec: Spec) -> Concluded:
        """Find the largest micro-batch of ``spec`` that trains, and hold it against its baseline."""
        case, search = Case.largest_batch(spec), MaxBatchSize(self._caller, self._runner, self._recorder)
        return self._concluded(case, LAUNCHES, partial(search.check, case, spec))

    def _concluded(self, case: Case, launches: int, check: Callable[[], Concluded]) -> Concluded:
        """Return what an earlier start of the job concluded of ``case``, or a plan, or what ``check`` does."""
        if (concluded := self._earlier(case)) is not None:
            return concluded
        withheld = plan.ask(self._caller, case, launches)
        if withheld:
            return Concluded(result=self._caller.result(case, PLANNED, withheld))
        with failures(self._caller, case):
            made = check()
        return conclude(self._caller, case, made)

    def _earlier(self, case: Case) -> Concluded | None:
        """Return what the SLURM job has concluded of it before; the test goes on after that."""
        self._need_launches(case)
        concluded = earlier(self._caller, case)
        if concluded is not None:
            self._caller.findings.begun = True
        return concluded

    def _need_launches(self, case: Case) -> None:
        """End the test at a case that is not told without a launch, where nothing is launched."""
        plan.name(self._caller, case)
        if self._settings.static:
            plan.skip(self._caller, case, f"{case.id}: {case.takes}")

    def _differs_from_plain(self, spec: Spec) -> Concluded | None:
        """That ``spec`` does not learn what its plain form does, where somebody asks for that first."""
        asked = self._caller.terms.parity or self._settings.parity
        if not asked or not isinstance(spec, TrainSpec) or should_run_out(self._caller):
            return None
        # The small one is of fewer GPUs and of no baseline: what cannot run here, or is in use, is the case itself.
        case = Case.of(spec)
        plan.name(self._caller, case)
        plan.need(self._caller, case, self._recorder.find(spec))
        held = self.same_training(spec)
        return held if held.fails else None

    def _against(self, case: Case, spec: Spec, scaled_from: Spec | None) -> Concluded:
        if self._settings.other_revision and not spec.is_script:
            why = "holds scripts, whose code is the project's; name the Python of another environment"
            raise CaseFailedError(f"{spec.id}: --perf-against {self._settings.against} {why}")
        withheld = plan.ask(self._caller, case, 2 * fewest_launches(self._settings.launches, spec))
        if withheld:
            return Concluded(result=self._caller.result(case, PLANNED, withheld))
        if asks_for_curve(self._caller, spec):
            unjudged = "its loss curve is not judged: --perf-against holds against another environment"
            case = replace(case, notes=(*case.notes, unjudged))
        scaling = Scaling.of(self._caller, self._recorder, spec, scaled_from)
        result = PairedComparison(self._caller, self._runner, spec).environments(case, scaling)
        self._run.result_cache.add(Measured(spec, result, None))
        made = Concluded(result=result, held_against=f"turns with {self._settings.against}")
        return conclude(self._caller, case, made)
