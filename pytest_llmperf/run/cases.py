"""The cases of one caller: each launched until it is decided, and concluded.

What pytest's ``perf`` fixture and ``llmperf check`` ask. ``CannotRunError`` says that a case cannot run here,
``CaseFailedError`` that its baseline cannot be used, ``DidNotTrainError`` that a launch yielded no record."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pytest_llmperf.judge.pairs import Bounds
from pytest_llmperf.run.capacity import LAUNCHES, MaxBatchSize
from pytest_llmperf.run.case import Caller, Case, neighbours
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.run.learning_cases import parity
from pytest_llmperf.run.paired_comparison import PairedComparison
from pytest_llmperf.run.spec_cases import SpecCases
from pytest_llmperf.run.tuning.winner import Recheck
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.spec import Spec, within
from pytest_llmperf.settings.train_spec import TrainSpec


class Cases:
    """Those of one spec, and those of several that are launched beside one another."""

    def __init__(self, caller: Caller) -> None:
        self._caller, self._run, self._one = caller, caller.run, SpecCases(caller)
        self.measure, self.soak = self._one.measure, self._one.soak

    def check(self, spec: Spec, scaled_from: Spec | None = None) -> Concluded:
        """As of one spec; where somebody asks for that first, that it learns what its plain form does."""
        caller, settings = self._caller, self._run.settings
        is_asked = (caller.terms.parity or settings.parity) and not (settings.soak_minutes or settings.static)
        if is_asked and isinstance(spec, TrainSpec) and not caller.should_run_out:
            # The small one is of fewer GPUs and of no baseline: what cannot run here, or is in use, is the case itself.
            case = Case.of(spec)
            caller.name(case)
            caller.need(case, self._one.recorder.find(spec))
            if (held := self.same_training(spec)).fails:
                return held
        return self._one.check(spec, scaled_from)

    def compare(self, before: Spec, after: Spec, bounds: Mapping[str, Bounds]) -> Concluded:
        """Measure what ``after`` brings over ``before``, in turns on the same GPUs."""
        before, after = (within(spec, self._run.rootdir) for spec in (before, after))
        alone = "compared in this environment alone: --perf-against holds perf.check"
        case = Case.compared(before, after, *([alone] if self._run.settings.against else []))
        launches = 2 * self._run.settings.launches
        # Made late: its policy reads baselines, which an earlier start has no need of.
        return self._one.concluded(case, launches, lambda: PairedComparison(self._caller, after).gain(case, bounds))

    def same_training(self, *specs: TrainSpec) -> Concluded:
        """Whether the last of ``specs`` learns what the one before it does, or alone what its plain form does."""
        case, one = Case.same_training(*specs), self._one
        return one.concluded(case, len(specs) + 1, partial(parity, self._caller, one.runner, case, specs))

    def tune(self, spec: TrainSpec, space: Space, runners_up: int) -> Concluded:
        """Whether ``spec`` still is the fastest of its neighbours in ``space``, which take turns with it."""
        case, recheck = Case.tuned(spec, space), Recheck(self._caller, spec, runners_up)
        launches = 2 * min(runners_up, len(neighbours(spec, space)))
        return self._one.concluded(case, launches, partial(recheck.check, case, space))

    def max_micro_batch(self, spec: Spec) -> Concluded:
        """Find the largest micro-batch of ``spec`` that trains, and hold it against its baseline."""
        spec, one = within(spec, self._run.rootdir), self._one
        case, search = Case.largest_batch(spec), MaxBatchSize(self._caller, one.runner, one.recorder)
        return one.concluded(case, LAUNCHES, partial(search.check, case, spec))
