"""What one spec can be asked: its launches, whether it holds beside its baseline, or by itself for minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pytest_llmperf.judge.soak import INTERRUPTED, SoakRule, judge_folder
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.baseline_comparison import BaselineComparison
from pytest_llmperf.run.capacity import runs_out
from pytest_llmperf.run.case import Caller, Case, fewest_launches
from pytest_llmperf.run.conclusion import Recorder, conclude, earlier, failures
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError, Concluded
from pytest_llmperf.run.measured import Measured, Scaling
from pytest_llmperf.run.paired_comparison import PairedComparison
from pytest_llmperf.run.runner import Runner
from pytest_llmperf.run.static_check import StaticCheck
from pytest_llmperf.settings.spec import Spec, within

# Steps that no soak comes to; data are numbered by it, and none are made beforehand.
_ENDLESS = 10_000_000


class SpecCases:
    def __init__(self, caller: Caller) -> None:
        self._caller, self._run, self._settings = caller, caller.run, caller.run.settings
        self.recorder, self.runner = Recorder(caller), Runner(caller)

    def measure(self, spec: Spec) -> tuple[Launch, ...]:
        """As many launches of ``spec`` as the run asks for; where nothing is launched, there is no going on without."""
        spec = within(spec, self._run.rootdir)
        case, wanted, findings = Case.measured(spec), self._settings.launches, self._caller.findings
        if self._settings.static:
            findings.cut = True
        self._need_launches(case)
        if withheld := self._caller.ask(case, wanted):
            findings.cut = True
            raise CannotRunError(withheld)
        with failures(self._caller, case):
            return tuple(self.runner.record(spec, number) for number in range(1, wanted + 1))

    def soak(self, spec: Spec, minutes: float) -> Concluded:
        """Judge so many minutes of ``spec`` against themselves."""
        spec = within(spec, self._run.rootdir)
        case = Case.soaked(spec, minutes)
        return self.concluded(case, 1, partial(self._soaked, case, spec, 60 * minutes))

    def _soaked(self, case: Case, spec: Spec, seconds: float) -> Concluded:
        """Ctrl-C ends it, and what was seen by then is a result too."""
        run, runner = self._run, Runner(self._caller, bare=True)
        rule = SoakRule.of(self._caller.policy(spec), on_cpu=run.on_cpu)
        plain, more = self._caller.result(case, "invalid", ""), {} if spec.is_script else {"min_steps": _ENDLESS}

        def judged(why_ended: str) -> Mapping[str, Any]:
            return judge_folder(runner.folder, seconds, spec, rule, why_ended)

        try:
            seen = runner.soak(case.id, spec.changed(steps=_ENDLESS, **more), seconds, judged)
        except KeyboardInterrupt:
            if runner.folder != Path():  # pytest makes no report of a test that it ends: the run itself is told
                found = replace(plain, **judged(INTERRUPTED))
                run.findings.results.append(found)
                self._caller.observer.say(f"{case.id}: {found.verdict}: {found.reason}")
            raise
        return Concluded(result=replace(plain, **seen), held_against="itself")

    def check(self, spec: Spec, scaled_from: Spec | None = None) -> Concluded:
        """Hold ``spec`` against its baseline, or under ``--perf-against`` against another environment."""
        if self._settings.soak_minutes:
            return self.soak(spec, self._settings.soak_minutes)
        spec = within(spec, self._run.rootdir)
        scaled_from = scaled_from and within(scaled_from, self._run.rootdir)
        case = Case.of(spec)
        self._caller.need_own_id(spec)
        if self._settings.static:  # how several GPUs share the work takes launches
            return StaticCheck(self._caller).check(spec)
        if (concluded := self._earlier(case)) is not None:
            self._run.result_cache.add(Measured(spec, concluded.result, self.recorder.find(spec)))
            return concluded
        if self._settings.against:
            return self._against(case, spec, scaled_from)
        with failures(self._caller, case):
            return self._beside_baseline(case, spec, scaled_from)

    def _beside_baseline(self, case: Case, spec: Spec, scaled_from: Spec | None) -> Concluded:
        caller, recorder, cache = self._caller, self.recorder, self._run.result_cache
        same = cache.same(spec)
        # By another test it may be recorded by now; a broken file is told before it costs GPU time.
        baseline = same.baseline if same else self._run.store.load(self._run.machine_kind, spec)
        asked, is_recorded = self._settings.launches, recorder.wants(baseline)
        launches = fewest_launches(asked, spec) if is_recorded else asked
        shares = f"{spec.id}: shares the launches of {same.nodeid}" if same else ""
        if withheld := caller.ask(case, 1 if caller.should_run_out else launches, baseline, shares):
            planned = caller.result(case, "planned", withheld)
            cache.add(Measured(spec, planned, baseline))
            return Concluded(result=planned)
        if not same:
            recorder.prepare(spec, baseline)
        if caller.should_run_out:
            return conclude(caller, case, Concluded(result=runs_out(caller, self.runner, spec)))
        scaling = Scaling.of(caller, recorder, spec, scaled_from)
        comparison = BaselineComparison(caller, self.runner, spec, same.result.launches if same else (), scaling)
        judge = partial(comparison.run, is_recorded=is_recorded)
        result = judge(baseline)
        if same:
            result, refused = same.lent(result)
        else:
            result, baseline, refused = recorder.recorded(
                result, baseline, judge, lambda now, held: recorder.record(spec, now, held, comparison.disagreement)
            )
        measured = Measured(spec, result, baseline, refused)
        cache.add(measured)
        made = Concluded(result=result, held_against=measured.held_against, refused=refused)
        return conclude(caller, case, made)

    def _against(self, case: Case, spec: Spec, scaled_from: Spec | None) -> Concluded:
        if self._settings.other_revision and not spec.is_script:
            why = "holds scripts, whose code is the project's; name the Python of another environment"
            raise CaseFailedError(f"{spec.id}: --perf-against {self._settings.against} {why}")

        def environments() -> Concluded:
            scaling = Scaling.of(self._caller, self.recorder, spec, scaled_from)
            result = PairedComparison(self._caller, spec).environments(case, scaling.joined if scaling else None)
            self._run.result_cache.add(Measured(spec, result, None))
            return Concluded(result=result, held_against=f"turns with {self._settings.against}")

        return self._asked(case, 2 * fewest_launches(self._settings.launches, spec), environments)

    def concluded(self, case: Case, launches: int, check: Callable[[], Concluded]) -> Concluded:
        """What an earlier start of the job concluded of ``case``, or else this one."""
        return self._earlier(case) or self._asked(case, launches, check)

    def _asked(self, case: Case, launches: int, check: Callable[[], Concluded]) -> Concluded:
        """A plan, or what ``check`` does."""
        if withheld := self._caller.ask(case, launches):
            return Concluded(result=self._caller.result(case, "planned", withheld))
        with failures(self._caller, case):
            made = check()
        return conclude(self._caller, case, made)

    def _earlier(self, case: Case) -> Concluded | None:
        """What the SLURM job has concluded of it before; the test goes on after that."""
        self._need_launches(case)
        if (concluded := earlier(self._caller, case)) is not None:
            self._caller.findings.begun = True
        return concluded

    def _need_launches(self, case: Case) -> None:
        self._caller.name(case)
        if self._settings.static:
            self._caller.skip(case, f"{case.id}: {case.takes}")
        if self._settings.soak_minutes and case.seconds is None:
            self._caller.skip(case, f"{case.id}: --perf-soak launches what perf.check and perf.script ask for, alone")
