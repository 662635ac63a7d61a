"""The ``perf`` fixture: launch a spec, judge it against its baseline, record it where asked, assert."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_llmperf.judge.baseline import Baseline, BaselineError, creep, size_of
from pytest_llmperf.judge.gain import Bounds
from pytest_llmperf.judge.verdict import Policy
from pytest_llmperf.measurement import Launch, LaunchFailed
from pytest_llmperf.plugin import benchmark, commands
from pytest_llmperf.plugin.comparing import Duel
from pytest_llmperf.plugin.failed import failed
from pytest_llmperf.plugin.known import known_failure
from pytest_llmperf.plugin.marks import Marks
from pytest_llmperf.plugin.recording import Recorder
from pytest_llmperf.plugin.runner import Runner
from pytest_llmperf.plugin.session import FINDINGS, Findings, PerfSession, Planned
from pytest_llmperf.plugin.show import Show
from pytest_llmperf.plugin.skips import why_skip
from pytest_llmperf.plugin.trial import Trial
from pytest_llmperf.report.failure import failure_message
from pytest_llmperf.result import CaseResult
from pytest_llmperf.spec import TrainSpec


class Perf:
    """What a test calls. One test may check several specs."""

    def __init__(self, request: pytest.FixtureRequest, session: PerfSession) -> None:
        item: pytest.Item = request.node
        self._request, self._item, self._session, self._settings = request, item, session, session.settings
        self._marks = Marks.of(item)
        self._findings = item.stash.setdefault(FINDINGS, Findings())
        self._recorder = Recorder(session, item.nodeid)
        self._show = Show(item.config)
        self._runner = Runner(session, self._show)

    def measure(self, spec: TrainSpec) -> tuple[Launch, ...]:
        """Launch ``spec`` as often as this run asks for (``--perf-launches``) and return the records.

        Raises:
            LaunchFailed: a launch yielded no record.
        """
        self._skip_or_plan(spec, None)
        return tuple(self._runner.launch(spec, number) for number in range(1, self._settings.launches + 1))

    def check(self, spec: TrainSpec) -> CaseResult:
        """Launch ``spec`` until it is decided against its baseline, and fail the test unless it holds.

        A case that cannot run here is skipped with the reason. Under ``--update-baselines`` its figures are recorded.
        """
        if not isinstance(spec, TrainSpec):
            raise failed(f"perf.check needs a TrainSpec, not {spec!r}; the fixture train_spec makes one")
        if self._settings.against:
            self._skip_or_plan(spec, None, turns=2)
            return self._check_against(spec)
        try:  # before the launch: a broken file costs no GPU time
            baseline = self._recorder.load(spec)
            self._skip_or_plan(spec, baseline)
            self._recorder.prepare(spec, baseline)
        except BaselineError as error:
            self._findings.results.append(self._result(spec, "invalid", str(error)))
            raise failed(str(error)) from None
        policy = self._policy(spec)
        trial = Trial(
            self._session,
            spec,
            baseline=baseline,
            policy=policy,
            inactive=self._marks.inactive,
            launch=self._runner.launch,
            say=self._show.say,
        )
        try:
            judgement = trial.run()
        except LaunchFailed as error:
            if error.failure.kind == "oom" and self._must_run_out():
                return self._conclude(self._result(spec, "pass", "ran out of memory, as declared"))
            raise self._launch_failed(spec, error) from None
        if self._must_run_out():
            reason = f"was declared to run out of memory below {self._marks.oom_below_gib:g} GiB, and trained"
            return self._conclude(replace(self._result(spec, "invalid", reason), launches=trial.launches))
        crept = creep(baseline, judgement.checks, policy.tolerances) if baseline else ()
        result = replace(
            self._result(spec, judgement.verdict, judgement.reason),
            checks=judgement.checks,
            launches=trial.launches,
            differences=_differences(baseline, trial.launches),
            notes=(*trial.notes(), *crept),
        )
        refused = ""
        if self._recorder.wants(baseline):
            try:
                result = self._recorder.record(spec, result, baseline)
            except BaselineError as error:
                refused = str(error)
        return self._conclude(result, size_of(baseline) if baseline else "none", refused)

    def compare(  # noqa: PLR0913 - two specs and four named bounds
        self,
        before: TrainSpec,
        after: TrainSpec,
        /,
        *,
        throughput_at_least: float | None = None,
        throughput_at_most: float | None = None,
        memory_at_least: float | None = None,
        memory_at_most: float | None = None,
    ) -> CaseResult:
        """Launch both specs in turns on the same GPUs and fail the test unless ``after`` keeps the bounds.

        Bounds are ratios ``after / before`` of tokens/s per GPU and of peak memory. It needs no baseline, so it holds
        on hardware that has none. Without bounds the ratios are only told.
        """
        try:
            bounds = {
                "throughput": Bounds(at_least=throughput_at_least, at_most=throughput_at_most),
                "memory": Bounds(at_least=memory_at_least, at_most=memory_at_most),
            }
        except ValueError as error:
            raise failed(f"perf.compare: {error}") from None
        self._skip_or_plan(before, None, turns=0)
        self._skip_or_plan(after, None, turns=2)
        duel = Duel(self._session, self._runner, self._show.say, self._policy(after))
        result = self._result(after, "", "")
        result = replace(result, id=f"{after.id}-over-{before.id}", digest=f"{after.digest}-{before.digest}")
        try:
            judged = duel.gain(before, after, bounds, self._marks.inactive)
        except LaunchFailed as error:
            raise self._launch_failed(after, error) from None
        return self._conclude(judged.told(result), held_against="turns with the other spec")

    def _check_against(self, spec: TrainSpec) -> CaseResult:
        duel = Duel(self._session, self._runner, self._show.say, self._policy(spec))
        try:
            judged = duel.environments(spec, self._settings.against, self._marks.inactive)
        except LaunchFailed as error:
            raise self._launch_failed(spec, error) from None
        return self._conclude(
            judged.told(self._result(spec, "", "")), held_against=f"turns with {self._settings.against}"
        )

    def _skip_or_plan(self, spec: TrainSpec, baseline: Baseline | None, *, turns: int = 1) -> None:
        """End the test here where nothing can or shall be launched; ``turns`` is launches for each that is asked for.

        A side of a comparison that plans nothing of its own has no turns.
        """
        if spec.digest not in self._findings.digests:
            self._findings.digests.append(spec.digest)
        num_gpus, num_cores = self._session.num_gpus, self._session.machine.cores
        reason = why_skip(spec, num_gpus=num_gpus, num_cores=num_cores)
        if reason:
            if self._settings.dry_run:
                self._findings.planned.append(Planned(id=spec.id, launches=0, gpus=0, seconds=None, skipped=reason))
            pytest.skip(reason)
        if self._settings.update == "prune":
            pytest.skip("--update-baselines=prune: nothing is launched")
        if self._settings.dry_run and turns:
            launches = turns * self._settings.launches
            seconds = _expected_seconds(baseline, launches)
            gpus = 0 if self._session.on_cpu else spec.gpus
            self._findings.planned.append(Planned(id=spec.id, launches=launches, gpus=gpus, seconds=seconds))
            pytest.skip("dry run: nothing is launched")

    def _policy(self, spec: TrainSpec) -> Policy:
        policy = Policy.for_cpu() if self._session.on_cpu else Policy.for_gpu()
        of_spec = {
            "tokens_per_second_per_gpu": spec.throughput_tolerance,
            "peak_reserved_bytes": spec.memory_tolerance,
        }
        for tolerances in (
            self._settings.tolerances,
            {metric: value for metric, value in of_spec.items() if value is not None},
            self._marks.tolerances,
        ):
            policy = policy.merged(tolerances)
        return policy

    def _must_run_out(self) -> bool:
        below = self._marks.oom_below_gib
        if below is None or self._session.on_cpu:
            return False
        return max(gpu.memory_bytes for gpu in self._session.machine.gpus) < below * 2**30

    def _launch_failed(self, spec: TrainSpec, error: LaunchFailed) -> BaseException:
        reason = f"launch failed ({error.failure.kind}): {error.failure.message}"
        self._findings.results.append(self._result(spec, "invalid", reason))
        known = known_failure(spec)
        rerun = f"run it again: {commands.rerun(self._item, self._session)}"
        return failed("\n".join([str(error), *([known] if known else []), rerun]))

    def _result(self, spec: TrainSpec, verdict: str, reason: str) -> CaseResult:
        return CaseResult(
            id=spec.id,
            digest=spec.digest,
            nodeid=self._item.nodeid,
            machine=self._session.machine_kind,
            verdict=verdict,
            reason=reason,
            reference=self._marks.reference,
            rung=self._marks.rung,
        )

    def _conclude(self, result: CaseResult, held_against: str = "none", refused: str = "") -> CaseResult:
        self._findings.results.append(result)
        benchmark.record(self._request, result)
        failing = {"invalid", "regressed", "new"} | ({"improved", "inconclusive"} if self._settings.strict else set())
        if refused and result.verdict not in failing:
            raise failed(f"{result.id}: {refused}")
        paired = held_against.startswith("turns")  # there is no baseline to accept it into
        if result.verdict in failing and not result.updated:
            message = failure_message(
                result,
                rerun=commands.rerun(self._item, self._session),
                accept="" if paired else commands.accept(self._item, self._session, result.verdict),
                baseline=held_against,
            )
            raise failed("\n".join(filter(None, [message, refused])))
        return result


def _differences(baseline: Baseline | None, launches: tuple[Launch, ...]) -> tuple[str, ...]:
    if baseline is None:
        return ()
    return baseline.launches[-1].differences(launches[-1])


def _expected_seconds(baseline: Baseline | None, launches: int) -> float | None:
    if baseline is None:
        return None
    walls = [launch.wall_seconds for launch in baseline.launches]
    return launches * sum(walls) / len(walls)
