"""The ``perf`` fixture: launch a spec, judge it against its baseline, record it where asked, assert."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from pytest_llmperf.insight import economics
from pytest_llmperf.judge.baseline import Baseline, BaselineError, accept, describe
from pytest_llmperf.judge.store import BaselineStore
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.judge.verdict import Judgement, Policy, judge
from pytest_llmperf.measurement import Launch, LaunchFailed
from pytest_llmperf.plugin import benchmark, commands
from pytest_llmperf.plugin.failed import failed
from pytest_llmperf.plugin.known import known_failure
from pytest_llmperf.plugin.marks import Marks
from pytest_llmperf.plugin.runner import Runner
from pytest_llmperf.plugin.session import FINDINGS, Findings, PerfSession, Planned
from pytest_llmperf.plugin.show import Show
from pytest_llmperf.plugin.skips import why_skip
from pytest_llmperf.report.failure import failure_message
from pytest_llmperf.result import CaseResult, Check
from pytest_llmperf.spec import TrainSpec


class Perf:
    """What a test calls. One test may check several specs."""

    def __init__(self, request: pytest.FixtureRequest, session: PerfSession) -> None:
        item: pytest.Item = request.node
        self._request, self._item, self._session, self._settings = request, item, session, session.settings
        self._marks = Marks.of(item)
        self._findings = item.stash.setdefault(FINDINGS, Findings())
        self._store = BaselineStore(session.settings.baselines)
        self._runner = Runner(session, Show(item.config))

    def measure(self, spec: TrainSpec) -> tuple[Launch, ...]:
        """Launch ``spec`` as often as this run asks for (``--perf-launches``) and return the records.

        Raises:
            LaunchFailed: a launch yielded no record.
        """
        self._skip_or_plan(spec, None)
        return tuple(self._runner.launch(spec, number) for number in range(1, self._settings.launches + 1))

    def check(self, spec: TrainSpec) -> CaseResult:
        """Measure ``spec``, judge it against its baseline, and fail the test unless it holds.

        A case that cannot run here is skipped with the reason. Under ``--update-baselines`` its figures are recorded.
        """
        baseline = self._baseline(spec)
        self._skip_or_plan(spec, baseline)
        try:
            launches = self.measure(spec)
        except LaunchFailed as error:
            if error.failure.kind == "oom" and self._must_run_out():
                return self._conclude(self._result(spec, "pass", "ran out of memory, as declared"))
            raise self._launch_failed(spec, error) from None
        if self._must_run_out():
            reason = f"was declared to run out of memory below {self._marks.oom_below_gib:g} GiB, and trained"
            return self._conclude(replace(self._result(spec, "invalid", reason), launches=launches))
        judgement = self._judge(spec, launches, baseline)
        result = replace(
            self._result(spec, judgement.verdict, judgement.reason),
            checks=judgement.checks,
            launches=launches,
            differences=_differences(baseline, launches),
        )
        refused = ""
        if self._settings.update == "all" or (self._settings.update == "new" and baseline is None):
            result, refused = self._record(spec, result)
        return self._conclude(result, baseline, refused)

    def _baseline(self, spec: TrainSpec) -> Baseline | None:
        # Before the launch: a broken file costs no GPU time.
        try:
            if self._settings.update:
                self._store.check_writable(self._session.machine_kind, spec)
            return self._store.load(self._session.machine_kind, spec)
        except BaselineError as error:
            raise failed(str(error)) from None

    def _skip_or_plan(self, spec: TrainSpec, baseline: Baseline | None) -> None:
        if spec.digest not in self._findings.digests:
            self._findings.digests.append(spec.digest)
        num_gpus, num_cores = self._session.num_gpus, self._session.machine.cores
        reason = why_skip(spec, num_gpus=num_gpus, num_cores=num_cores)
        if reason:
            pytest.skip(reason)
        if self._settings.dry_run:
            launches = self._settings.launches
            seconds = _expected_seconds(baseline, launches)
            gpus = 0 if self._session.on_cpu else spec.gpus
            self._findings.planned.append(Planned(id=spec.id, launches=launches, gpus=gpus, seconds=seconds))
            pytest.skip("dry run: nothing is launched")

    def _judge(self, spec: TrainSpec, launches: tuple[Launch, ...], baseline: Baseline | None) -> Judgement:
        contradictions = dict.fromkeys(
            line for launch in launches for line in troubles(spec, launch, inactive=self._marks.inactive)
        )
        extra = _mfu(spec, launches)
        return judge(launches, baseline, self._policy(spec), tuple(contradictions), extra)

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

    def _record(self, spec: TrainSpec, result: CaseResult) -> tuple[CaseResult, str]:
        """``result`` with what was recorded; or why nothing was."""

        def change(old: Baseline | None) -> Baseline:
            return accept(
                old,
                spec=spec,
                machine=self._session.machine_kind,
                launches=result.launches,
                verdict=result.verdict,
                checks=result.checks,
                reason=self._settings.reason,
                recorded_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                recorded_by=self._item.nodeid,
            )

        try:
            old, new = self._store.update(self._session.machine_kind, spec, change)
        except BaselineError as error:
            return result, f"not recorded: {error}"
        return replace(result, updated="\n".join(describe(old, new))), ""

    def _conclude(self, result: CaseResult, baseline: Baseline | None = None, refused: str = "") -> CaseResult:
        self._findings.results.append(result)
        benchmark.record(self._request, result)
        failing = {"invalid", "regressed", "new"} | ({"improved"} if self._settings.strict else set())
        if refused and result.verdict not in failing:
            raise failed(f"{result.id}: {refused}")
        if result.verdict in failing and not result.updated:
            message = failure_message(
                result,
                rerun=commands.rerun(self._item, self._session),
                accept=commands.accept(self._item, self._session, result.verdict),
                baseline_launches=len(baseline.launches) if baseline else 0,
            )
            raise failed("\n".join(filter(None, [message, refused])))
        return result


def _mfu(spec: TrainSpec, launches: tuple[Launch, ...]) -> tuple[Check, ...]:
    geometry = spec.architecture.geometry
    peak = economics.peak_flops(launches[0].environment.gpu, spec.compute_precision)
    if geometry is None or peak is None:
        return ()
    rate = math.exp(sum(math.log(launch.tokens_per_second_per_gpu) for launch in launches) / len(launches))
    value = economics.mfu(rate, geometry.flops_per_token(spec.sequence_length), peak)
    return (Check(metric="mfu", value=value, unit="1"),)


def _differences(baseline: Baseline | None, launches: tuple[Launch, ...]) -> tuple[str, ...]:
    if baseline is None:
        return ()
    return baseline.launches[-1].environment.differences(launches[-1].environment)


def _expected_seconds(baseline: Baseline | None, launches: int) -> float | None:
    if baseline is None:
        return None
    walls = [launch.wall_seconds for launch in baseline.launches]
    return launches * sum(walls) / len(walls)
