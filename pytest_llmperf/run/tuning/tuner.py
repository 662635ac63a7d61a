"""Tuner: one search, from the candidates to a winner that was shown to be one."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pytest_llmperf.judge.tuning_objective import front
from pytest_llmperf.launch import machine
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.findings import CaseFailedError, RunEndedError
from pytest_llmperf.run.search_store import TrialStore
from pytest_llmperf.run.tuning.final import Final, Knowledge
from pytest_llmperf.run.tuning.forecast import (
    MemoryForecast,
    StepPredictions,
    by_settings,
    counted_prior,
    least_memory,
)
from pytest_llmperf.run.tuning.trial_stage import Prior, SideBySide, TrialStage, compiles
from pytest_llmperf.run.tuning.trials import Trials, Tried, Tuning, TuningOrder
from pytest_llmperf.settings.parallelism import on_one_gpu
from pytest_llmperf.settings.registry import why_skip
from pytest_llmperf.settings.space import Candidates
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec, known_failure

# Of the time given, what the trials leave for the end at least, and at most.
_END_SHARE, _END_MOST = 0.15, 0.35
# What turns of two and the winner's own case take: launches for more steps than a trial's.
_END_LAUNCHES, _FULL_STEPS = 6, 14
_PARITY_SECONDS = 35.0
# Of it, what one trial may take, and the seconds that it may take in any case: a compiler may have much to do.
_TRIAL_SHARE, _TRIAL_LEAST = 0.2, 60.0
# Of it, what trials on one GPU each may take before those on all of them.
_NARROW_SHARE = 0.4

# Seconds that its own end takes: processes are reaped.
_CLOSING = 3.0

# Of a model whose weights, gradients and Adam's two states, in 16 bits, take more of a CPU's host, memory is predicted.
_STATE_BYTES, _LARGE_SHARE = 8, 0.4
# Multiplied and added, forwards and twice backwards.
_FLOPS_OF_A_WEIGHT = 6

_BETTER_BY = 0.01
# So few configurations are tried before anything could be counted of them.
_FEW = 8


@dataclass(frozen=True)
class Standing:
    """Where a search is."""

    tried: tuple[Tried, ...]
    best: Tried | None
    left: int
    seconds_left: float
    doing: str
    """In words; empty where a trial has ended."""


class Tuner:
    """One caller's search."""

    def __init__(self, caller: Caller, order: TuningOrder, watch: Callable[[Standing], None] = lambda _: None) -> None:
        self._caller, self._run, self._order, self._watch = caller, caller.run, order, watch
        self._until = 0.0
        self._stage: TrialStage | None = None
        self._end: Final | None = None
        self._store = TrialStore(self._run.machine_kind, tuple(gpu.uuid for gpu in self._run.gpus))

    def run(self) -> Tuning:
        """Search until nothing is worth its seconds, or time is over; Ctrl-C ends it, and what is known is told.

        Raises:
            CaseFailedError: nothing of the space can run here.
        """
        begun = time.monotonic()
        self._until = self._run.until = begun + self._order.seconds - min(_CLOSING, self._order.seconds / 10)
        self._predictions = StepPredictions()
        limit = self._limit_bytes()
        forecast = MemoryForecast(limit, self._predictions)
        with suppress(SpecError):  # then something else comes first
            forecast.ask([self._order.space.first])  # beside what follows: to look at a large space takes seconds
        candidates = self._runnable(self._order.space.candidates())
        specs, why = candidates.specs, ""
        tuning = Tuning(begun_at=specs[0], refused=candidates.refused, left=len(specs), unseen=candidates.unseen)
        try:
            tuning = self._searched(tuning, candidates, forecast)
        except KeyboardInterrupt:
            why = "interrupted"
        except RunEndedError as error:
            why = str(error)
        finally:
            self._predictions.close()
            self._run.until = math.inf
        if why and self._stage is not None:
            tuning = self._known(self._stage, candidates, forecast)
        if why and self._end is not None:
            tuning = self._end.so_far or tuning
        if not why and not tuning.tried and tuning.left:
            why = "its time was over before anything was found that fits"
        seconds = time.monotonic() - begun
        return replace(tuning, ended=why, unkept=self._store.unkept, limit_bytes=limit, seconds=seconds)

    def _searched(self, tuning: Tuning, candidates: Candidates, forecast: MemoryForecast) -> Tuning:
        """``tuning`` with what is found of ``candidates`` where nothing ends it before its end."""
        specs, run = candidates.specs, self._run
        least = self._least(specs, forecast)
        if least is not None and not forecast.is_enough_for(least[1]):
            return replace(tuning, too_large=len(specs), left=0, least=least)
        if least is not None and least[0] not in specs:  # they are a sample of a large space
            specs = (*specs, least[0])
        # A CPU's small models are over before anything is counted, and its compiler takes longer than all else there.
        counted, recipes = None, () if run.on_cpu else self._order.space.recipes()
        if not run.on_cpu and len(specs) > _FEW and self._order.objective.name != "memory":
            counted = counted_prior(self._order.space, specs, self._predictions, run.machine.gpus[0].name)
        prior = self._narrow_prior(specs, forecast, counted, recipes) or counted
        known = Prior(prior, recipes, least[0] if least is not None else None)
        self._stage = stage = TrialStage(self._order.objective, specs, forecast, self._tell, known)
        self._tried(stage, self._until, lambda: self._end_seconds(stage))
        tuning = self._known(stage, candidates, forecast)
        return tuning if tuning.winner is None else self._final(stage, tuning, forecast)

    def _limit_bytes(self) -> int:
        """Return what each rank may hold, as far as predictions are asked for it; 0: everything fits.

        A CPU's host has room for the small models that are trained there, and is asked of large ones alone: their
        launch would take the memory of all others on it.
        """
        if not self._run.on_cpu:
            return self._run.memory_bytes
        base, host = self._order.space.base, machine.host_memory_bytes()
        geometry = base.architecture.geometry
        states = _STATE_BYTES * geometry.flops_per_token(0) / _FLOPS_OF_A_WEIGHT if geometry is not None else 0.0
        return host // base.gpus if states * base.gpus > _LARGE_SHARE * host else 0

    def _least(self, specs: Sequence[TrainSpec], forecast: MemoryForecast) -> tuple[TrainSpec, int] | None:
        """Where the first of ``specs`` does not fit: what takes the least memory of all like them, and how much."""
        if forecast.fits(specs[0]):
            return None
        self._watch(Standing((), None, len(specs), self._until - time.monotonic(), "predicting the least memory"))
        is_narrow = all(_narrow(spec) == spec for spec in specs)

        def able(spec: TrainSpec) -> bool:
            is_alike = not is_narrow or _narrow(spec) == spec
            return is_alike and self._why_not(spec) is None and not known_failure(spec)

        return least_memory(self._order.space, specs, forecast, able, self._until)

    def _why_not(self, spec: TrainSpec) -> str | None:
        return why_skip(spec, num_gpus=self._run.num_gpus, num_cores=self._run.machine.cores)

    def _runnable(self, candidates: Candidates) -> Candidates:
        """Those that this machine can run, with what it lacks among the reasons for the others."""
        refused, specs = candidates.refused.copy(), []
        for spec in candidates.specs:
            why = self._why_not(spec)
            if why is None:
                specs.append(spec)
            else:
                refused[why.removeprefix(f"{spec.id}: ").replace(spec.id, "it")] += 1
        if not specs:
            self._predictions.close()
            reasons = "; ".join(f"{why} ({number})" for why, number in refused.most_common(3))
            raise CaseFailedError(f"{self._order.space.base.id}: nothing of this space can be trained here: {reasons}")
        return Candidates(tuple(specs), refused, candidates.unseen)

    def _tried(self, stage: TrialStage, until: float, end_seconds: Callable[[], float]) -> None:
        """Trials of ``stage``, as many at once as there are GPUs for."""
        width = max(spec.gpus for spec in stage.specs)
        alone = self._run.on_cpu or not self._run.site.is_here
        most = 1 if alone else max(1, self._run.num_gpus // width)
        for spec, trial in Trials(self._caller, self._store).known(stage.specs).items():
            stage.note(Tried(spec, trial, was_kept=True))
        trials = SideBySide(self._caller, self._store, most, max(_TRIAL_LEAST, _TRIAL_SHARE * self._order.seconds))
        try:
            stage.run(trials, until, end_seconds)
        finally:
            trials.close()

    def _narrow_prior(
        self,
        specs: Sequence[TrainSpec],
        forecast: MemoryForecast,
        counted: Sequence[float] | None,
        recipes: Sequence[Sequence[TrainSpec]],
    ) -> list[float] | None:
        """Try on one GPU each what takes all GPUs; what that says of ``specs``, ``None`` where these are not many."""
        if self._run.on_cpu or not self._run.site.is_here or self._run.num_gpus == 1:
            return None
        counterparts = [_narrow(spec) for spec in specs]
        narrow = list(dict.fromkeys(one for one in counterparts if one is not None))
        if all(spec.gpus == 1 for spec in specs) or not narrow:
            return None
        known = dict(zip(counterparts, counted, strict=True)) if counted is not None else {}
        prior = [known[one] for one in narrow] if known else None
        least = self._least(narrow, forecast)
        if least is not None and not forecast.is_enough_for(least[1]):  # it fits on several alone
            return None
        known_first = Prior(
            prior,
            [[one for one in map(_narrow, specs) if one is not None] for specs in recipes],
            least[0] if least is not None else None,
        )
        stage = TrialStage(self._order.objective, narrow, forecast, self._tell, known_first)
        self._tried(stage, time.monotonic() + _NARROW_SHARE * self._order.seconds, lambda: 0.0)
        if stage.best is None:  # it fits on several alone
            return None
        mean = stage.search.prediction().mean
        middle = float(mean.mean())
        return [middle if one is None else float(mean[stage.numbers[one]]) for one in counterparts]

    def _end_seconds(self, stage: TrialStage) -> float:
        """Return the seconds that the end takes: turns of the best, the proof that the winner is sound."""
        least, most, best = _END_SHARE * self._order.seconds, _END_MOST * self._order.seconds, stage.best
        if best is None:
            return least
        each = stage.search.costs.outside(compiles=compiles(best.spec)) + _FULL_STEPS * best.trial.step_seconds
        needed = _END_LAUNCHES * each + (_PARITY_SECONDS if self._order.proves else 0.0)
        return min(most, max(least, needed))

    def _tell(self, stage: TrialStage, doing: str) -> None:
        left = len(stage.search.left)
        self._watch(Standing(tuple(stage.tried), stage.best, left, self._until - time.monotonic(), doing))

    def _known(self, stage: TrialStage, candidates: Candidates, forecast: MemoryForecast) -> Tuning:
        by_id = {one.spec.id: one for one in stage.tried}
        refused = candidates.refused + Counter(known_failure(spec) or "" for spec in stage.known_to_fail)
        best = stage.best
        is_too_small = not stage.search.left and all(one.trial.is_too_large for one in stage.tried)
        return Tuning(
            begun_at=stage.specs[0],
            tried=tuple(stage.tried),
            winner=None if best is None else best.spec,
            front=tuple(by_id[name].spec for name in front({name: one.trial for name, one in by_id.items()})),
            refused=refused,
            too_large=len(stage.too_large) + sum(one.trial.is_too_large for one in stage.tried),
            left=len(stage.search.left),
            put_off=stage.put_off(),
            unseen=candidates.unseen,
            better_chance=1.0 if best is None else stage.search.chance_of_better(_BETTER_BY),
            memory_errors=forecast.errors,
            least=(forecast.least() or (by_settings(stage.specs), 0)) if is_too_small else None,
        )

    def _final(self, stage: TrialStage, tuning: Tuning, forecast: MemoryForecast) -> Tuning:
        search, prediction = stage.search, stage.search.prediction()

        def estimate(spec: TrainSpec) -> tuple[float, float] | None:
            number = stage.numbers.get(spec)
            return None if number is None else (float(prediction.mean[number]), float(prediction.sd[number]))

        self._end = final = Final(self._caller, self._order, self._until, lambda doing: self._tell(stage, doing))
        ranked = [stage.specs[number] for number in search.in_order()]
        return final.decided(tuning, ranked, Knowledge(estimate, forecast.fits), num_close=len(search.close_to_best()))


def _narrow(spec: TrainSpec) -> TrainSpec | None:
    """The same work for a GPU on one of them; ``None`` where one cannot do it."""
    try:
        return on_one_gpu(spec)
    except SpecError:
        return None
