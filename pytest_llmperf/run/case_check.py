"""The cases of one caller: each launched until it is decided, and concluded.

What pytest's ``perf`` fixture and ``llmperf check`` ask; what neither can serve is raised as one of ``run.errors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pytest_llmperf.judge.baseline import Baseline, size_of
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.gain import Bounds
from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run.baseline_comparison import BaselineComparison
from pytest_llmperf.run.caller import Caller
from pytest_llmperf.run.capacity import LAUNCHES, MaxBatchSize
from pytest_llmperf.run.case import Case
from pytest_llmperf.run.conclusion import Conclusion, Conclusions, Recorder
from pytest_llmperf.run.derived_metrics import Scaling, reference_width
from pytest_llmperf.run.dry_run import Planner
from pytest_llmperf.run.errors import CannotRunError
from pytest_llmperf.run.launch_retry import runs_out, should_run_out
from pytest_llmperf.run.learning_checks import CurveCheck, ParityCheck, has_text, small_case, why_no_curve
from pytest_llmperf.run.paired_comparison import PairedComparison
from pytest_llmperf.run.result_cache import Measured
from pytest_llmperf.run.runner import Runner
from pytest_llmperf.run.tuning.recheck import Recheck, neighbours, tuned_case
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.train_spec import TrainSpec


class CaseChecks:
    """What one test may ask for, or one command."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._conclusions, self._planner = Conclusions(caller), Planner(caller)
        self._recorder, self._runner = Recorder(caller.context, caller.nodeid), Runner(caller)

    def measure(self, spec: TrainSpec) -> tuple[Launch, ...]:
        """As many launches of ``spec`` as the run asks for.

        Raises:
            CannotRunError: it cannot run here, or nothing is launched.
            DidNotTrainError: a launch yields no record.
        """
        case, wanted = Case.of(spec, judges=False), self._caller.context.settings.launches
        self._planner.name(case)
        withheld = self._planner.ask(case, wanted)
        if withheld:
            self._caller.findings.cut = True  # whoever asked computes with launches: there is no going on without
            raise CannotRunError(withheld)
        launches: list[Launch] = []
        with self._conclusions.failures(case):
            for number in range(1, wanted + 1):
                outcome = self._runner.launch(spec, number)
                if isinstance(outcome, Failure):
                    raise LaunchFailed(spec.id, outcome)
                launches.append(outcome)
        return tuple(launches)

    def check(self, spec: TrainSpec, scaled_from: TrainSpec | None = None) -> Conclusion:
        """``spec`` against its baseline, or under ``--perf-against`` against another environment.

        Raises:
            CannotRunError: it cannot run here.
            CaseFailedError: its baseline cannot be used, or a launch yields no record (``DidNotTrainError``).
        """
        case, context = Case.of(spec), self._caller.context
        differs = self._held(spec)
        if differs is not None:
            return differs
        concluded = self._earlier(case)
        if concluded is not None:
            context.result_cache.add(Measured(spec, concluded.result, self._recorder.find(spec)))
            return concluded
        with self._conclusions.failures(case):
            if context.settings.against:
                return self._against(case, spec, scaled_from)
            same = context.result_cache.same(spec)
            # By another test it may be recorded by now; a broken file is told before it costs GPU time.
            baseline = same.baseline if same else self._recorder.load(spec)
            fails = should_run_out(self._caller)
            curve = None if fails else self._curve(spec, same)
            shares = f"{spec.id}: shares the launches of {same.nodeid}" if same else ""
            launches = 1 if fails else context.settings.launches + (curve.launches_more if curve else 0)
            withheld = self._planner.ask(case, launches, baseline, shares)
            if withheld:
                planned = self._conclusions.planned(case, withheld)
                context.result_cache.add(Measured(spec, planned.result, baseline))
                return planned
            if not same:
                self._recorder.prepare(spec, baseline)
            if fails:
                return self._conclusions.conclude(runs_out(self._caller, self._runner, spec))
            measured = self._measured(spec, scaled_from, baseline, same, curve)
        context.result_cache.add(measured)
        held_against = size_of(measured.baseline) if measured.baseline else "none"
        return self._conclusions.conclude(measured.result, held_against, measured.refused)

    def _measured(
        self,
        spec: TrainSpec,
        scaled_from: TrainSpec | None,
        baseline: Baseline | None,
        same: Measured | None,
        curve: CurveCheck | None,
    ) -> Measured:
        """``spec`` against ``baseline`` and ``curve``, and what was recorded of it."""
        comparison = BaselineComparison(self._caller, self._runner, spec, same.result.launches if same else ())

        def run(*, is_recorded: bool) -> CaseResult:
            result = comparison.run(baseline, self._scaling(spec, scaled_from), is_recorded=is_recorded)
            return curve.judged(result) if curve else result

        result, refused = run(is_recorded=self._recorder.wants(baseline)), ""
        if same:
            result, refused = same.lent(result)
        while not same and self._recorder.wants(baseline):
            recorded = self._recorder.record(spec, result, baseline, comparison.disagreement)
            result, refused, baseline = recorded.result, recorded.refused, recorded.baseline
            if not recorded.is_overtaken:
                break
            result = run(is_recorded=True)
        if curve:
            result, refused = curve.recorded(result, refused)
        return Measured(spec, result, baseline, refused)

    def compare(self, before: TrainSpec, after: TrainSpec, bounds: Mapping[str, Bounds]) -> Conclusion:
        """What ``after`` brings over ``before``, in turns on the same GPUs.

        Raises:
            CannotRunError: one of them cannot run here.
            DidNotTrainError: a launch yields no record.
        """
        against = self._caller.context.settings.against
        alone = ["compared in this environment alone: --perf-against holds perf.check"] if against else []
        case = Case.compared(before, after, *alone)
        concluded = self._earlier(case)
        if concluded is not None:
            return concluded
        withheld = self._planner.ask(case, 2 * self._caller.context.settings.launches)
        if withheld:
            return self._conclusions.planned(case, withheld)
        with self._conclusions.failures(case):
            result = PairedComparison(self._caller, self._runner, after).gain(case, bounds)
        return self._conclusions.conclude(result, "turns with the other spec")

    def same_training(self, *specs: TrainSpec) -> Conclusion:
        """Whether the last of ``specs`` learns what the one before it does, or what its plain form does if it is alone.

        Raises:
            CannotRunError: it cannot run here.
            DidNotTrainError: a launch ends without a word of what it did.
        """
        case = small_case(*specs)
        concluded = self._earlier(case)
        if concluded is not None:
            return concluded
        withheld = self._planner.ask(case, len(specs) + 1)
        if withheld:
            return self._conclusions.planned(case, withheld)
        if not self._caller.context.site.is_here:
            raise CannotRunError(
                f"{case.id}: small trainings are launched on this machine alone: --perf-launcher local"
            )
        with self._conclusions.failures(case):
            result = ParityCheck(self._caller, self._runner, self._caller.context.small_trainings).check(case, specs)
        return self._conclusions.conclude(result, "the plain form in double precision")

    def tune(self, spec: TrainSpec, space: Space, runners_up: int) -> Conclusion:
        """Whether ``spec`` still is the fastest of its neighbours in ``space``, the best of which take turns with it.

        Raises:
            CannotRunError: it cannot run here.
            DidNotTrainError: a launch of ``spec`` yields no record.
        """
        case = tuned_case(spec, space)
        concluded = self._earlier(case)
        if concluded is not None:
            return concluded
        withheld = self._planner.ask(case, 2 * min(runners_up, len(neighbours(spec, space))))
        if withheld:
            return self._conclusions.planned(case, withheld)
        with self._conclusions.failures(case):
            result = Recheck(self._caller, runners_up).check(case, spec, space)
        return replace(self._conclusions.conclude(result, "turns with its neighbours"), is_acceptable=False)

    def _held(self, spec: TrainSpec) -> Conclusion | None:
        """That ``spec`` does not learn what its plain form does, where somebody asks for that first."""
        asked = self._caller.terms.parity or self._caller.context.settings.parity
        if not asked or should_run_out(self._caller):
            return None
        # The small one is of fewer GPUs and of no baseline: what cannot run here, or is in use, is the case itself.
        case = Case.of(spec)
        self._planner.name(case)
        self._planner.need(case, self._recorder.find(spec))
        held = self.same_training(spec)
        return held if held.fails else None

    def max_micro_batch(self, spec: TrainSpec) -> Conclusion:
        """The largest micro-batch of ``spec`` that trains, against its baseline.

        Raises:
            CannotRunError: it cannot run here.
            CaseFailedError: its baseline cannot be used, or a launch ends for another reason than a lack of memory.
        """
        case = Case.largest_batch(spec)
        concluded = self._earlier(case)
        if concluded is not None:
            return concluded
        withheld = self._planner.ask(case, LAUNCHES)
        if withheld:
            return self._conclusions.planned(case, withheld)
        with self._conclusions.failures(case):
            checked = MaxBatchSize(self._caller, self._runner, self._recorder).check(case, spec)
        size = checked.baseline and f"{checked.baseline.size} sequences"
        return self._conclusions.conclude(checked.result, size or "none", checked.refused)

    def _earlier(self, case: Case) -> Conclusion | None:
        """What the SLURM job has concluded of it before; the test goes on after that."""
        self._planner.name(case)
        concluded = self._conclusions.earlier(case)
        if concluded is not None:
            self._planner.goes_on()
        return concluded

    def _curve(self, spec: TrainSpec, same: Measured | None) -> CurveCheck | None:
        """Its losses beside those before, where somebody asks for that.

        Raises:
            BaselineError: there is no curve to judge, or what is stored cannot be used.
        """
        by_run = self._caller.context.settings.loss_curve and has_text(spec)
        if not (self._caller.terms.loss_curve or by_run):
            return None
        why_none = why_no_curve(spec)
        if why_none:
            raise BaselineError(why_none)
        return CurveCheck(self._caller, self._runner, spec, same.result.loss_curve if same else None)

    def _against(self, case: Case, spec: TrainSpec, scaled_from: TrainSpec | None) -> Conclusion:
        context = self._caller.context
        withheld = self._planner.ask(case, 2 * context.settings.launches)
        if withheld:
            return self._conclusions.planned(case, withheld)
        if self._caller.terms.loss_curve or (context.settings.loss_curve and has_text(spec)):
            unjudged = "its loss curve is not judged: --perf-against holds against another environment"
            case = replace(case, notes=(*case.notes, unjudged))
        comparison = PairedComparison(self._caller, self._runner, spec)
        result = comparison.environments(case, context.settings.against, self._scaling(spec, scaled_from))
        context.result_cache.add(Measured(spec, result, None))
        return self._conclusions.conclude(result, f"turns with {context.settings.against}")

    def _scaling(self, spec: TrainSpec, scaled_from: TrainSpec | None) -> Scaling | None:
        if spec.gpus == 1:
            return None
        return Scaling(self._caller, spec, reference_width(self._caller.context, self._recorder, spec, scaled_from))
