"""The cases of one caller: each launched until it is decided, and concluded.

What pytest's ``perf`` fixture and ``llmperf check`` ask. ``CannotRunError`` says that a case cannot run here,
``CaseFailedError`` that its baseline cannot be used, ``DidNotTrainError`` that a launch yielded no record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pytest_llmperf.judge.baseline import Baseline, size_of
from pytest_llmperf.judge.pairs import Bounds
from pytest_llmperf.judge.soak import INTERRUPTED, SoakRule, judge_folder
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import PLANNED, CaseResult
from pytest_llmperf.run.baseline_comparison import BaselineComparison
from pytest_llmperf.run.capacity import LAUNCHES, MaxBatchSize, runs_out, should_run_out
from pytest_llmperf.run.case import Caller, Case, fewest_launches, neighbours
from pytest_llmperf.run.conclusion import Recorder, conclude, earlier, failures
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError, Concluded
from pytest_llmperf.run.learning_cases import parity
from pytest_llmperf.run.measured import Measured, Scaling
from pytest_llmperf.run.paired_comparison import PairedComparison
from pytest_llmperf.run.runner import Runner
from pytest_llmperf.run.static_check import StaticCheck
from pytest_llmperf.run.tuning.winner import Recheck
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.spec import ScriptSpec, Spec, within
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec

# Steps that no soak comes to; data are numbered by it, and none are made beforehand.
_ENDLESS = 10_000_000


class Cases:
    def __init__(self, caller: Caller) -> None:
        self._caller, self._run, self._settings = caller, caller.run, caller.run.settings
        self._recorder, self._runner = Recorder(caller), Runner(caller)

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
            return tuple(self._runner.record(spec, number) for number in range(1, wanted + 1))

    def soak(self, spec: Spec, minutes: float) -> Concluded:
        """Judge so many minutes of ``spec`` against themselves."""
        spec = within(spec, self._run.rootdir)
        case = Case.soaked(spec, minutes)
        return self._concluded(case, 1, partial(self._soaked, case, spec, 60 * minutes))

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
        self._need_own_id(spec)
        if self._settings.static:  # how several GPUs share the work takes launches
            return StaticCheck(self._caller).check(spec)
        if (differs := self._differs_from_plain(spec)) is not None:
            return differs
        if (concluded := self._earlier(case)) is not None:
            self._run.result_cache.add(Measured(spec, concluded.result, self._recorder.find(spec)))
            return concluded
        if self._settings.against:
            return self._against(case, spec, scaled_from)
        with failures(self._caller, case):
            return self._beside_baseline(case, spec, scaled_from)

    def _need_own_id(self, spec: Spec) -> None:
        """Two commands of one id would be one another's baseline."""
        other = self._run.scripts.setdefault(spec.id, spec) if isinstance(spec, ScriptSpec) else spec
        if isinstance(other, ScriptSpec) and other.digest != spec.digest:
            raise SpecError(
                f"{spec.id} is the id of `{other.command}` and of another command of this run; say name= in one of them"
            )

    def _beside_baseline(self, case: Case, spec: Spec, scaled_from: Spec | None) -> Concluded:
        cache = self._run.result_cache
        same = cache.same(spec)
        # By another test it may be recorded by now; a broken file is told before it costs GPU time.
        baseline = same.baseline if same else self._run.store.load(self._run.machine_kind, spec)
        fails = should_run_out(self._caller)
        shares = f"{spec.id}: shares the launches of {same.nodeid}" if same else ""
        asked, is_recorded = self._settings.launches, self._recorder.wants(baseline)
        launches = 1 if fails else (fewest_launches(asked, spec) if is_recorded else asked)
        if withheld := self._caller.ask(case, launches, baseline, shares):
            planned = self._caller.result(case, PLANNED, withheld)
            cache.add(Measured(spec, planned, baseline))
            return Concluded(result=planned)
        if not same:
            self._recorder.prepare(spec, baseline)
        if fails:
            made = Concluded(result=runs_out(self._caller, self._runner, spec))
            return conclude(self._caller, case, made)
        measured = self._measured(spec, scaled_from, baseline, same)
        cache.add(measured)
        held_against = size_of(measured.baseline) if measured.baseline else "none"
        made = Concluded(result=measured.result, held_against=held_against, refused=measured.refused)
        return conclude(self._caller, case, made)

    def _measured(
        self, spec: Spec, scaled_from: Spec | None, baseline: Baseline | None, same: Measured | None
    ) -> Measured:
        """``spec`` against ``baseline``, and what was recorded of it."""
        scaling = Scaling.of(self._caller, self._recorder, spec, scaled_from)
        launches = same.result.launches if same else ()
        comparison = BaselineComparison(self._caller, self._runner, spec, launches, scaling)
        is_recorded = self._recorder.wants(baseline)
        judge = partial(comparison.run, is_recorded=is_recorded)

        def record(result: CaseResult, baseline: Baseline | None) -> CaseResult:
            return self._recorder.record(spec, result, baseline, comparison.disagreement)

        result = judge(baseline)
        if same:
            result, refused = same.lent(result)
        else:
            result, baseline, refused = self._recorder.recorded(result, baseline, judge, record)
        return Measured(spec, result, baseline, refused)

    def compare(self, before: Spec, after: Spec, bounds: Mapping[str, Bounds]) -> Concluded:
        """Measure what ``after`` brings over ``before``, in turns on the same GPUs."""
        before, after = (within(spec, self._run.rootdir) for spec in (before, after))
        alone = "compared in this environment alone: --perf-against holds perf.check"
        case = Case.compared(before, after, *([alone] if self._settings.against else []))
        launches = 2 * self._settings.launches
        # Made late: its policy reads baselines, which an earlier start has no need of.
        return self._concluded(case, launches, lambda: PairedComparison(self._caller, after).gain(case, bounds))

    def same_training(self, *specs: TrainSpec) -> Concluded:
        """Whether the last of ``specs`` learns what the one before it does, or alone what its plain form does."""
        case = Case.same_training(*specs)
        return self._concluded(case, len(specs) + 1, partial(parity, self._caller, self._runner, case, specs))

    def tune(self, spec: TrainSpec, space: Space, runners_up: int) -> Concluded:
        """Whether ``spec`` still is the fastest of its neighbours in ``space``, which take turns with it."""
        case, recheck = Case.tuned(spec, space), Recheck(self._caller, spec, runners_up)
        launches = 2 * min(runners_up, len(neighbours(spec, space)))
        return self._concluded(case, launches, partial(recheck.check, case, space))

    def max_micro_batch(self, spec: Spec) -> Concluded:
        """Find the largest micro-batch of ``spec`` that trains, and hold it against its baseline."""
        spec = within(spec, self._run.rootdir)
        case, search = Case.largest_batch(spec), MaxBatchSize(self._caller, self._runner, self._recorder)
        return self._concluded(case, LAUNCHES, partial(search.check, case, spec))

    def _concluded(self, case: Case, launches: int, check: Callable[[], Concluded]) -> Concluded:
        """What an earlier start of the job concluded of ``case``, or else this one."""
        return self._earlier(case) or self._asked(case, launches, check)

    def _asked(self, case: Case, launches: int, check: Callable[[], Concluded]) -> Concluded:
        """A plan, or what ``check`` does."""
        if withheld := self._caller.ask(case, launches):
            return Concluded(result=self._caller.result(case, PLANNED, withheld))
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

    def _differs_from_plain(self, spec: Spec) -> Concluded | None:
        """That ``spec`` does not learn what its plain form does, where somebody asks for that first."""
        asked = self._caller.terms.parity or self._settings.parity
        if not asked or not isinstance(spec, TrainSpec) or should_run_out(self._caller):
            return None
        # The small one is of fewer GPUs and of no baseline: what cannot run here, or is in use, is the case itself.
        case = Case.of(spec)
        self._caller.name(case)
        self._caller.need(case, self._recorder.find(spec))
        held = self.same_training(spec)
        return held if held.fails else None

    def _against(self, case: Case, spec: Spec, scaled_from: Spec | None) -> Concluded:
        if self._settings.other_revision and not spec.is_script:
            why = "holds scripts, whose code is the project's; name the Python of another environment"
            raise CaseFailedError(f"{spec.id}: --perf-against {self._settings.against} {why}")

        def environments() -> Concluded:
            scaling = Scaling.of(self._caller, self._recorder, spec, scaled_from)
            result = PairedComparison(self._caller, spec).environments(case, scaling.joined if scaling else None)
            self._run.result_cache.add(Measured(spec, result, None))
            return Concluded(result=result, held_against=f"turns with {self._settings.against}")

        return self._asked(case, 2 * fewest_launches(self._settings.launches, spec), environments)
