"""The cases of one test: each launched until it is decided, and concluded.

What pytest's ``perf`` fixture and ``llmperf check`` ask; what neither can serve is raised as one of ``run.errors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from pytest_llmperf.engine.baseline_comparison import BaselineComparison
from pytest_llmperf.engine.conclusion import Conclusion, Conclusions
from pytest_llmperf.engine.dry_run import Planner
from pytest_llmperf.engine.launch_retry import LaunchRetry
from pytest_llmperf.engine.max_batch_size import LAUNCHES, MaxBatchSize
from pytest_llmperf.engine.paired_comparison import PairedComparison
from pytest_llmperf.engine.recorder import Recorder
from pytest_llmperf.engine.runner import Runner
from pytest_llmperf.engine.scaling_reference import Scaling, stored_narrow
from pytest_llmperf.engine.terms import CaseTerms, policy_of
from pytest_llmperf.judge.baseline import Baseline, size_of
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.gain import Bounds
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.errors import CannotRunError
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.observer import Observer
from pytest_llmperf.run.result_cache import Measured
from pytest_llmperf.spec.train_spec import TrainSpec


class CaseChecks:
    """What one test may ask for, or one command."""

    def __init__(
        self, context: Context, terms: CaseTerms, findings: Findings, observer: Observer, *, nodeid: str
    ) -> None:
        """``nodeid`` names who asks, in results and baselines."""
        self._context, self._terms, self._findings, self._observer = context, terms, findings, observer
        self._conclusions = Conclusions(context, terms, findings, nodeid)
        self._planner = Planner(context, findings, nodeid)
        self._recorder = Recorder(context, nodeid)
        self._runner = Runner(context, observer, findings=findings)

    def measure(self, spec: TrainSpec) -> tuple[Launch, ...]:
        """As many launches of ``spec`` as the run asks for.

        Raises:
            CannotRunError: it cannot run here, or nothing is launched.
            DidNotTrainError: a launch yields no record.
        """
        number = self._context.settings.launches
        self._planner.name(spec.digest)
        withheld = self._planner.ask(spec, name=spec.id, launches=number, judges=False)
        if withheld:
            self._findings.cut = True  # whoever asked computes with launches: there is no going on without
            raise CannotRunError(withheld)
        try:
            return tuple(self._runner.launch(spec, at) for at in range(1, number + 1))
        except LaunchFailed as error:
            raise self._conclusions.launch_failed(self._conclusions.result(spec), error, spec) from None

    def check(self, spec: TrainSpec, scaled_from: TrainSpec | None = None) -> Conclusion:
        """``spec`` against its baseline, or under ``--perf-against`` against another environment.

        Raises:
            CannotRunError: it cannot run here.
            CaseFailedError: its baseline cannot be used, or a launch yields no record (``DidNotTrainError``).
        """
        self._planner.name(spec.digest)
        concluded = self._conclusions.earlier(spec.digest)
        if concluded is not None:
            self._planner.goes_on()
            self._context.result_cache.add(Measured(spec, concluded.result, self._recorder.find(spec)))
            return concluded
        against = self._context.settings.against
        return self._against(spec, scaled_from, against) if against else self._against_baseline(spec, scaled_from)

    def compare(self, before: TrainSpec, after: TrainSpec, bounds: Mapping[str, Bounds]) -> Conclusion:
        """What ``after`` brings over ``before``, in turns on the same GPUs.

        Raises:
            CannotRunError: one of them cannot run here.
            DidNotTrainError: a launch yields no record.
        """
        self._planner.name(before.digest, after.digest)
        both, settings = f"{after.id}-over-{before.id}", self._context.settings
        result = replace(self._conclusions.result(after), id=both, digest=f"{after.digest}-{before.digest}")
        concluded = self._conclusions.earlier(result.digest)
        if concluded is not None:
            self._planner.goes_on()
            return concluded
        withheld = self._planner.ask(before, after, name=both, launches=2 * settings.launches)
        if withheld:
            return Conclusion(result=replace(result, verdict="planned", reason=withheld))
        if settings.against:
            result = replace(result, notes=("compared in this environment alone: --perf-against holds perf.check",))
        try:
            judged = self._turns(after).gain(before, after, bounds, self._terms.inactive)
        except LaunchFailed as error:
            spec = before if error.spec_id == before.id else after
            raise self._conclusions.launch_failed(result, error, spec) from None
        return self._conclusions.conclude_turns(judged.told(result), "the other spec")

    def max_micro_batch(self, spec: TrainSpec) -> Conclusion:
        """The largest micro-batch of ``spec`` that trains, against its baseline.

        Raises:
            CannotRunError: it cannot run here.
            CaseFailedError: its baseline cannot be used, or a launch ends for another reason than a lack of memory.
        """
        self._planner.name(spec.capacity_digest)
        result = replace(self._conclusions.result(spec), id=spec.capacity_id, digest=spec.capacity_digest)
        concluded = self._conclusions.earlier(result.digest)
        if concluded is not None:
            self._planner.goes_on()
            return concluded
        withheld = self._planner.ask(spec, name=result.id, launches=LAUNCHES, limited=True)
        if withheld:
            return Conclusion(result=replace(result, verdict="planned", reason=withheld))
        capacity = MaxBatchSize(self._context, self._runner, self._recorder, self._observer.say)
        try:
            judged = capacity.check(spec, result, self._terms.inactive)
        except BaselineError as error:
            raise self._conclusions.unusable(result, error) from None
        except LaunchFailed as error:
            raise self._conclusions.launch_failed(result, error, spec) from None
        return self._conclusions.conclude(*judged)

    def _against_baseline(self, spec: TrainSpec, scaled_from: TrainSpec | None) -> Conclusion:
        same = self._context.result_cache.same(spec)
        baseline, withheld = self._prepared(spec, same)
        if withheld:
            result = self._conclusions.result(spec, "planned", withheld)
            self._context.result_cache.add(Measured(spec, result, baseline))
            return Conclusion(result=result)
        if self._must_run_out():
            return self._runs_out(spec)
        policy = policy_of(spec, self._context, self._terms)
        comparison = BaselineComparison(
            self._context,
            spec,
            policy=policy,
            inactive=self._terms.inactive,
            launch=self._runner.launch,
            say=self._observer.say,
            launches=same.result.launches if same else (),
            keep=partial(self._conclusions.begin, spec.digest),
            begun=self._conclusions.begun(spec.digest),
        )

        def judge(baseline: Baseline | None) -> CaseResult:
            try:
                judgement = comparison.run(baseline, self._scaling(spec, scaled_from, baseline, policy))
            except LaunchFailed as error:
                raise self._conclusions.launch_failed(self._conclusions.result(spec), error, spec) from None
            return comparison.told(self._conclusions.result(spec), judgement)

        def record(result: CaseResult, baseline: Baseline | None) -> CaseResult:
            return self._recorder.record(spec, result, baseline, comparison.disagreement)

        if same:
            result, refused = same.lent(judge(baseline))
        else:
            result, baseline, refused = self._recorder.settle(baseline, judge, record)
        self._context.result_cache.add(Measured(spec, result, baseline, refused))
        return self._conclusions.conclude(result, size_of(baseline) if baseline else "none", refused)

    def _prepared(self, spec: TrainSpec, same: Measured | None) -> tuple[Baseline | None, str]:
        """What it is held against, and why it is not launched; a broken file is told before it costs GPU time."""
        try:
            # By another test it may be recorded by now.
            baseline = same.baseline if same else self._recorder.load(spec)
            shares = f"{spec.id}: shares the launches of {same.nodeid}" if same else ""
            launches = 1 if self._must_run_out() else self._context.settings.launches
            withheld = self._planner.ask(spec, name=spec.id, launches=launches, baseline=baseline, shares=shares)
            if not same and not withheld:
                self._recorder.prepare(spec, baseline)
        except BaselineError as error:
            raise self._conclusions.unusable(self._conclusions.result(spec), error) from None
        return baseline, withheld

    def _runs_out(self, spec: TrainSpec) -> Conclusion:
        """One launch decides: it runs out of memory, and nobody else holds any, or it trained."""
        sound = LaunchRetry(lambda _: (), self._observer.say)
        try:
            launch = sound.launch(spec, lambda spec: self._runner.launch(spec, 1))
        except LaunchFailed as error:
            if error.failure.kind != "oom" or sound.spoilt:
                raise self._conclusions.launch_failed(self._conclusions.result(spec), error, spec) from None
            return self._conclusions.conclude(self._conclusions.result(spec, "pass", "ran out of memory, as declared"))
        reason = f"was declared to run out of memory below {self._terms.oom_below_gib:g} GiB, and trained"
        return self._conclusions.conclude(
            replace(self._conclusions.result(spec, "invalid", reason), launches=(launch,))
        )

    def _against(self, spec: TrainSpec, scaled_from: TrainSpec | None, python: str) -> Conclusion:
        withheld = self._planner.ask(spec, name=spec.id, launches=2 * self._context.settings.launches)
        if withheld:
            return Conclusion(result=self._conclusions.result(spec, "planned", withheld))
        scaling = self._scaling(spec, scaled_from, None, policy_of(spec, self._context, self._terms))
        try:
            judged = self._turns(spec).environments(spec, python, self._terms.inactive, scaling)
        except LaunchFailed as error:
            raise self._conclusions.launch_failed(self._conclusions.result(spec), error, spec) from None
        result = judged.told(self._conclusions.result(spec))
        self._context.result_cache.add(Measured(spec, result, None))
        return self._conclusions.conclude_turns(result, python)

    def _turns(self, spec: TrainSpec) -> PairedComparison:
        return PairedComparison(
            self._context, self._runner, self._observer.say, policy_of(spec, self._context, self._terms)
        )

    def _scaling(
        self, spec: TrainSpec, scaled_from: TrainSpec | None, baseline: Baseline | None, policy: Policy
    ) -> Scaling | None:
        if spec.gpus == 1:
            return None
        narrow = self._context.result_cache.narrow(spec, scaled_from)
        if narrow is None and not self._context.settings.against:
            narrow = stored_narrow(self._recorder, spec, scaled_from)
        return Scaling(self._context, baseline=baseline, policy=policy, narrow=narrow, terms=self._terms.efficiency)

    def _must_run_out(self) -> bool:
        below = self._terms.oom_below_gib
        if below is None or self._context.on_cpu:
            return False
        return self._context.memory_bytes < below * 2**30
