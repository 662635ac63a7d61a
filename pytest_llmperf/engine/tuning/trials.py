"""Trials: configurations launched for a few steps, one by one, each kept as soon as it is known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pytest_llmperf.engine.baseline_comparison import contradictions
from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.engine.runner import Runner
from pytest_llmperf.judge import validity
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.run.trial_store import TrialStore
from pytest_llmperf.spec.train_spec import TrainSpec

#: Of a trial: the median of five steps after the two first is known to half a per cent.
STEPS, LEAST_STEPS, WARM_UP = 7, 7, 2

# However little time there is: what is launched at all may begin.
_LEAST_SECONDS = 20.0

# What says nothing of the configuration, and may end otherwise the next time.
_NOT_KEPT = frozenset({"timeout", "killed", "never-started", "unwritable", "rendezvous", "node-failure"})

# What a neighbour may make of a launch that trains without it: it takes memory, and time.
_BY_NEIGHBOURS = frozenset({"oom", "timeout"})


class Trials:
    """Of one search."""

    def __init__(self, caller: Caller, store: TrialStore, most_seconds: float = math.inf) -> None:
        """``most_seconds`` of one: what hangs must not take the time of all others."""
        self._caller, self._store = caller, store
        self._runner, self._most_seconds = Runner(caller, bare=True), most_seconds

    def while_waiting(self, call: Callable[[], None]) -> None:
        """``call`` is asked again and again while hardware is waited for; what it raises ends the wait."""
        self._runner.while_waiting = call

    def known(self, specs: Sequence[TrainSpec]) -> Mapping[TrainSpec, Trial]:
        """What earlier searches found of ``specs``."""
        kept = self._store.all()
        return {spec: kept[_short(spec)] for spec in specs if _short(spec) in kept} if kept else {}

    def make(self, spec: TrainSpec, until: float = math.inf) -> Trial:
        """Launch ``spec``; what becomes of it is kept, but for what the next launch may do otherwise.

        What is not over at ``until``, by ``time.monotonic()``, is ended.
        """
        short, before = _short(spec), self._runner.seconds
        self._runner.most_seconds = max(_LEAST_SECONDS, min(self._most_seconds, until - time.monotonic()))
        outcome = self._runner.launch(short, 1)
        trial = self._trial(short, outcome, self._runner.seconds - before)
        if trial.kind not in _NOT_KEPT and not trial.disturbances:
            self._store.keep(short, trial)
        return trial

    def _trial(self, spec: TrainSpec, outcome: Launch | Failure, seconds: float) -> Trial:
        if isinstance(outcome, Failure):
            neighbours = validity.neighbours(outcome.health) if outcome.kind in _BY_NEIGHBOURS else ()
            return Trial(
                digest=spec.digest,
                id=spec.id,
                wall_seconds=round(seconds, 3),
                failure=outcome.message,
                kind=outcome.kind,
                disturbances=neighbours,
            )
        troubles = contradictions(spec, (outcome,), self._caller.terms.inactive)
        # So few steps have no drift to speak of.
        around = () if troubles else validity.circumstances(outcome, math.inf, self._caller.context.experience).lines
        return Trial.of(outcome, spec.id, troubles, around)


def _short(spec: TrainSpec) -> TrainSpec:
    return replace(spec, steps=STEPS, min_steps=LEAST_STEPS, warmup_steps=WARM_UP)
