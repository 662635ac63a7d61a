"""The ``perf`` fixture: launch a spec, judge it against its baseline, record it where asked, assert."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from pytest_llmperf.engine.baseline_comparison import Trial
from pytest_llmperf.engine.conclusion import Conclusions
from pytest_llmperf.engine.dry_run import Planner
from pytest_llmperf.engine.launch_retry import SoundLaunches
from pytest_llmperf.engine.max_batch_size import LAUNCHES, Capacity
from pytest_llmperf.engine.paired_comparison import Duel
from pytest_llmperf.engine.preconditions import need_a_narrower_training, need_nats, need_specs, need_the_same_tokens
from pytest_llmperf.engine.recorder import Recorder
from pytest_llmperf.engine.runner import Runner
from pytest_llmperf.engine.scaling_reference import Scaling, stored_narrow
from pytest_llmperf.engine.terms import policy_of
from pytest_llmperf.judge.baseline import Baseline, size_of
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.gain import Bounds
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.plugin.console import Show
from pytest_llmperf.plugin.markers import Marks
from pytest_llmperf.plugin.outcomes import failed
from pytest_llmperf.plugin.reports import FINDINGS
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.result_cache import Measured
from pytest_llmperf.spec.train_spec import TrainSpec


class Perf:
    """What a test calls. One test may check several specs."""

    def __init__(self, request: pytest.FixtureRequest, session: PerfSession) -> None:
        item: pytest.Item = request.node
        self._session, self._settings = session, session.settings
        self._marks = Marks.of(item)
        self._findings = item.stash.setdefault(FINDINGS, Findings())
        self._conclusions = Conclusions(request, session, self._marks, self._findings)
        self._planner = Planner(session, self._findings, item.nodeid)
        self._recorder = Recorder(session, item.nodeid)
        self._show = Show(item.config)
        self._runner = Runner(session, self._show, findings=self._findings)

    def measure(self, spec: TrainSpec) -> tuple[Launch, ...]:
        """Launch ``spec`` as often as this run asks for (``--perf-launches``) and return the records.

        A launch that yields no record fails the test with ``DidNotTrain``.
        """
        need_specs("measure", spec)
        self._planner.name(spec.digest)
        withheld = self._planner.ask(spec, name=spec.id, launches=self._settings.launches, judges=False)
        if withheld:
            self._findings.cut = True  # whoever asked computes with launches: there is no going on without
            pytest.skip(withheld)
        try:
            return tuple(self._runner.launch(spec, number) for number in range(1, self._settings.launches + 1))
        except LaunchFailed as error:
            raise self._conclusions.launch_failed(self._conclusions.result(spec), error, spec) from None

    def check(self, spec: TrainSpec, *, scaled_from: TrainSpec | None = None) -> CaseResult:
        """Launch ``spec`` until it is decided against its baseline, and fail the test unless it holds.

        The efficiency of several GPUs is over the same spec on the fewest, or over ``scaled_from`` where the work of a
        GPU changes with their number. What another test has measured of the very same case is not launched again.
        A case that cannot run here is skipped with the reason. Under ``--update-baselines`` its figures are recorded.
        A run that launches nothing returns a result without figures, whose verdict is ``planned``, so that the test
        goes on to its next spec.
        """
        need_specs("check", spec, *([] if scaled_from is None else [scaled_from]))
        if scaled_from is not None and scaled_from.digest == spec.digest:
            scaled_from = None  # of a series that is written as one, the narrowest names itself
        if scaled_from is not None:
            need_a_narrower_training(spec, scaled_from)
        self._planner.name(spec.digest)
        concluded = self._conclusions.earlier(spec.digest)
        if concluded is not None:
            self._planner.goes_on()
            self._session.widths.add(Measured(spec, concluded[0], self._recorder.find(spec)))
            return self._conclusions.conclude(*concluded)
        return (self._check_against if self._settings.against else self._check)(spec, scaled_from)

    def compare(  # noqa: PLR0913 - two specs and five named bounds
        self,
        before: TrainSpec,
        after: TrainSpec,
        /,
        *,
        throughput_at_least: float | None = None,
        throughput_at_most: float | None = None,
        memory_at_least: float | None = None,
        memory_at_most: float | None = None,
        loss_within: float | None = None,
    ) -> CaseResult:
        """Launch both specs in turns on the same GPUs and fail the test unless ``after`` keeps the bounds.

        Bounds are ratios ``after / before`` of tokens/s per GPU and of peak memory. It needs no baseline, so it holds
        on hardware that has none. Without bounds the ratios are only told, which a note says.
        ``loss_within`` (nats) bounds how far apart the losses of any step may be, of two specs that take the same
        tokens a step.
        """
        need_nats(loss_within)
        try:
            bounds = {
                "throughput": Bounds(at_least=throughput_at_least, at_most=throughput_at_most, of="throughput"),
                "memory": Bounds(at_least=memory_at_least, at_most=memory_at_most, of="memory"),
                "loss": Bounds(at_most=loss_within),
            }
        except ValueError as error:
            raise failed(f"perf.compare: {error}") from None
        need_specs("compare", before, after)
        if loss_within is not None:
            need_the_same_tokens(before, after)
        self._planner.name(before.digest, after.digest)
        both = f"{after.id}-over-{before.id}"
        result = replace(self._conclusions.result(after), id=both, digest=f"{after.digest}-{before.digest}")
        concluded = self._conclusions.earlier(result.digest)
        if concluded is not None:
            self._planner.goes_on()
            return self._conclusions.conclude(*concluded)
        withheld = self._planner.ask(before, after, name=both, launches=2 * self._settings.launches)
        if withheld:
            return replace(result, verdict="planned", reason=withheld)
        if self._settings.against:
            result = replace(result, notes=("compared in this environment alone: --perf-against holds perf.check",))
        duel = Duel(self._session, self._runner, self._show.say, policy_of(after, self._session, self._marks))
        try:
            judged = duel.gain(before, after, bounds, self._marks.inactive)
        except LaunchFailed as error:
            raise self._conclusions.launch_failed(
                result, error, before if error.spec_id == before.id else after
            ) from None
        return self._conclusions.conclude(judged.told(result), held_against="turns with the other spec")

    def max_micro_batch(self, spec: TrainSpec) -> CaseResult:
        """Find the largest micro-batch of ``spec`` that trains, to the unit, and fail the test if it was larger.

        A fresh launch has trained it, and another has run out of memory with one sequence more. The size that
        ``spec`` has is where the search begins if its memory cannot be predicted.
        """
        need_specs("max_micro_batch", spec)
        self._planner.name(spec.capacity_digest)
        result = replace(self._conclusions.result(spec), id=spec.capacity_id, digest=spec.capacity_digest)
        concluded = self._conclusions.earlier(result.digest)
        if concluded is not None:
            self._planner.goes_on()
            return self._conclusions.conclude(*concluded)
        withheld = self._planner.ask(spec, name=result.id, launches=LAUNCHES, limited=True)
        if withheld:
            return replace(result, verdict="planned", reason=withheld)
        capacity = Capacity(self._session, self._runner, self._recorder, self._show.say)
        try:
            judged = capacity.check(spec, result, self._marks.inactive)
        except BaselineError as error:
            raise self._conclusions.unusable(result, error) from None
        except LaunchFailed as error:
            raise self._conclusions.launch_failed(result, error, spec) from None
        return self._conclusions.conclude(*judged)

    def _check(self, spec: TrainSpec, scaled_from: TrainSpec | None) -> CaseResult:
        same = self._session.widths.same(spec)
        baseline, withheld = self._prepared(spec, same)
        if withheld:
            result = self._conclusions.result(spec, "planned", withheld)
            self._session.widths.add(Measured(spec, result, baseline))
            return result
        if self._must_run_out():
            return self._check_that_it_runs_out(spec)
        policy = policy_of(spec, self._session, self._marks)
        trial = Trial(
            self._session,
            spec,
            policy=policy,
            inactive=self._marks.inactive,
            launch=self._runner.launch,
            say=self._show.say,
            launches=same.result.launches if same else (),
            keep=partial(self._conclusions.begin, spec.digest),
            begun=self._conclusions.begun(spec.digest),
        )

        def judge(baseline: Baseline | None) -> CaseResult:
            try:
                judgement = trial.run(baseline, self._scaling(spec, scaled_from, baseline, policy))
            except LaunchFailed as error:
                raise self._conclusions.launch_failed(self._conclusions.result(spec), error, spec) from None
            return trial.told(self._conclusions.result(spec), judgement)

        def record(result: CaseResult, baseline: Baseline | None) -> CaseResult:
            return self._recorder.record(spec, result, baseline, trial.disagreement)

        if same:
            result, refused = same.lent(judge(baseline))
        else:
            result, baseline, refused = self._recorder.settle(baseline, judge, record)
        self._session.widths.add(Measured(spec, result, baseline, refused))
        return self._conclusions.conclude(result, size_of(baseline) if baseline else "none", refused)

    def _prepared(self, spec: TrainSpec, same: Measured | None) -> tuple[Baseline | None, str]:
        """What it is held against, and why it is not launched; a broken file is told before it costs GPU time."""
        try:
            # By another test it may be recorded by now.
            baseline = same.baseline if same else self._recorder.load(spec)
            shares = f"{spec.id}: shares the launches of {same.nodeid}" if same else ""
            launches = 1 if self._must_run_out() else self._settings.launches
            withheld = self._planner.ask(spec, name=spec.id, launches=launches, baseline=baseline, shares=shares)
            if not same and not withheld:
                self._recorder.prepare(spec, baseline)
        except BaselineError as error:
            raise self._conclusions.unusable(self._conclusions.result(spec), error) from None
        return baseline, withheld

    def _check_that_it_runs_out(self, spec: TrainSpec) -> CaseResult:
        """One launch decides: it runs out of memory, and nobody else holds any, or it trained."""
        sound = SoundLaunches(lambda _: (), self._show.say)
        try:
            launch = sound.launch(spec, lambda spec: self._runner.launch(spec, 1))
        except LaunchFailed as error:
            if error.failure.kind != "oom" or sound.spoilt:
                raise self._conclusions.launch_failed(self._conclusions.result(spec), error, spec) from None
            return self._conclusions.conclude(self._conclusions.result(spec, "pass", "ran out of memory, as declared"))
        reason = f"was declared to run out of memory below {self._marks.oom_below_gib:g} GiB, and trained"
        return self._conclusions.conclude(
            replace(self._conclusions.result(spec, "invalid", reason), launches=(launch,))
        )

    def _scaling(
        self, spec: TrainSpec, scaled_from: TrainSpec | None, baseline: Baseline | None, policy: Policy
    ) -> Scaling | None:
        if spec.gpus == 1:
            return None
        narrow = self._session.widths.narrow(spec, scaled_from)
        if narrow is None and not self._settings.against:
            narrow = stored_narrow(self._recorder, spec, scaled_from)
        return Scaling(self._session, baseline=baseline, policy=policy, narrow=narrow, terms=self._marks.efficiency)

    def _check_against(self, spec: TrainSpec, scaled_from: TrainSpec | None) -> CaseResult:
        withheld = self._planner.ask(spec, name=spec.id, launches=2 * self._settings.launches)
        if withheld:
            return self._conclusions.result(spec, "planned", withheld)
        policy, python = policy_of(spec, self._session, self._marks), self._settings.against
        duel = Duel(self._session, self._runner, self._show.say, policy)
        scaling = self._scaling(spec, scaled_from, None, policy)
        try:
            judged = duel.environments(spec, python, self._marks.inactive, scaling)
        except LaunchFailed as error:
            raise self._conclusions.launch_failed(self._conclusions.result(spec), error, spec) from None
        result = judged.told(self._conclusions.result(spec))
        self._session.widths.add(Measured(spec, result, None))
        return self._conclusions.conclude(result, held_against=f"turns with {python}")

    def _must_run_out(self) -> bool:
        below = self._marks.oom_below_gib
        if below is None or self._session.on_cpu:
            return False
        return self._session.memory_bytes < below * 2**30
