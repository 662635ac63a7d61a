"""Recheck: whether a configuration still is the best of its neighbours, each of which takes turns with it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from pytest_llmperf.judge.tuning import CLOSE, OBJECTIVES, Turns
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, RATE
from pytest_llmperf.records.result import Verdict, joined_reasons
from pytest_llmperf.run.case import Caller, Case, neighbours
from pytest_llmperf.run.findings import CannotRunError, Concluded
from pytest_llmperf.run.paired_comparison import Side
from pytest_llmperf.run.tuning.trials import Trials, take_turns
from pytest_llmperf.settings.registry import why_skip
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats

_OBJECTIVE = OBJECTIVES["throughput"]

# What is better by less is no reason to change anything; on a CPU, whose times are noise, what its gate holds.
_WORTH = 0.01

_TURNS = "turns with its neighbours"


class Recheck:
    """One caller's winners."""

    def __init__(self, caller: Caller, most: int) -> None:
        """``most`` neighbours take turns with it: those that were the fastest in a trial of their own."""
        self._caller, self._most = caller, most
        self._notes: list[str] = []
        self._num_spoilt = 0
        """Neighbours whose trials were spoilt twice by others."""

    def check(self, case: Case, spec: TrainSpec, space: Space) -> Concluded:
        """``improved`` where a neighbour is shown to be faster by 1 % (on a CPU, its tolerance), else ``pass``.

        ``inconclusive`` where others have spoilt trials, and no neighbour is left to take turns with.
        """
        self._notes += space.no_neighbours(spec)
        launches, beside, troubles = list[Launch](), dict[str, Turns](), list[str]()
        for other in self._runners_up(spec, neighbours(spec, space)):
            taken, told, trouble = self._turns(spec, other)
            launches += taken
            troubles += trouble
            if told is not None:
                beside[_difference(spec, other)] = told
        if troubles:
            result = self._caller.result(case, "invalid", joined_reasons(troubles))
            return Concluded(result=replace(result, launches=tuple(launches)), held_against=_TURNS)
        worth = self._worth(spec)
        faster = [words for words, turns in beside.items() if turns.high < -math.log1p(worth)]
        ratio = METRICS["throughput_ratio"]
        checks = tuple(ratio.check(math.exp(-turns.log), detail=words) for words, turns in beside.items())
        lines = {words: _line(words, turns) for words, turns in beside.items()}
        verdict: Verdict = "pass"
        reason = f"still the fastest: {len(beside)} of its neighbours took turns with it"
        if faster:
            verdict, reason = "improved", joined_reasons(lines[words] for words in faster)
        elif self._num_spoilt and not beside:  # to pass would say that something was compared
            verdict = "inconclusive"
            reason = f"none of its neighbours took turns with it: the trials of {self._num_spoilt} were spoilt twice"
        elif not beside:
            reason = "still the fastest: no neighbour trains and comes near enough for turns"
        result = self._caller.result(case, verdict, reason, checks)
        notes = [line for words, line in lines.items() if words not in faster]
        if faster:
            best = min(faster, key=lambda words: beside[words].log)
            notes.insert(0, f"to take it, give the test {best}, or what llmperf tune finds anew")
        if self._caller.run.on_cpu:
            self._notes.append(
                f"a CPU's times are noise: a neighbour counts as faster from {1 + worth:g} times on; "
                "set perf_throughput_tolerance, e.g. to 0.3, on a quiet machine"
            )
        result = replace(result, launches=tuple(launches), notes=(*notes, *self._notes, *result.notes))
        return Concluded(result=result, held_against=_TURNS)

    def _worth(self, spec: TrainSpec) -> float:
        """By how much, as a fraction, another has to be faster."""
        if not self._caller.run.on_cpu:
            return _WORTH
        return self._caller.policy(spec).tolerances.get(RATE, math.inf)

    def _runners_up(self, spec: TrainSpec, others: Sequence[TrainSpec]) -> list[TrainSpec]:
        """The fastest of ``others``; each has a trial first where there are more than take turns."""
        run = self._caller.run
        lacks = {other: why_skip(other, num_gpus=run.num_gpus, num_cores=run.machine.cores) for other in others}
        self._notes += [f"{_difference(spec, other)} was not tried: {why}" for other, why in lacks.items() if why]
        able = [other for other, why in lacks.items() if why is None]
        if others and not able:  # to pass would say that something was compared
            raise CannotRunError(f"{spec.id}: none of its neighbours can be tried: {'; '.join(self._notes)}")
        if len(able) <= self._most:
            return able
        trials = Trials(self._caller)
        # Of another day, a driver, a file of somebody's own or the hardware itself may be another.
        today = time.strftime("%Y-%m-%d", time.gmtime())
        kept, found = trials.known((spec, *able)), []
        for other in (spec, *able):
            known = kept.get(other)
            trial = known if known is not None and known.started_at.startswith(today) else trials.make(other)
            found.append((other, trials.make(other) if trial.disturbances else trial))  # others have spoilt it
        logs = {other: _OBJECTIVE.log_of(trial) for other, trial in found if trial.ranks}
        for other, trial in found[1:]:
            if trial.disturbances:
                self._num_spoilt += 1
                self._notes.append(f"the trial of {_difference(spec, other)} was spoilt twice: {trial.disturbances[0]}")
            elif not trial.is_measured:
                self._notes.append(f"{_difference(spec, other)} does not train: {trial.kind}: {trial.failure}")
        own = logs.pop(spec, None)
        limit = math.inf if own is None else own + 2 * CLOSE
        measured = sorted(((log, other) for other, log in logs.items() if log is not None), key=lambda one: one[0])
        near = [other for log, other in measured if log <= limit]
        if len(near) < len(measured) and own is not None:  # turns with those would decide nothing
            log, other = measured[len(near)]
            slower = f"{_difference(spec, other)}, at {formats.percent(math.expm1(own - log))}"
            self._notes.append(
                f"{len(measured) - len(near)} others are too slow for turns, the fastest {slower} in a trial"
            )
        return near[: self._most]

    def _turns(self, spec: TrainSpec, other: TrainSpec) -> tuple[tuple[Launch, ...], Turns | None, list[str]]:
        """The launches of ``spec``, how ``other`` did beside it, and what is wrong with ``spec``."""
        worth = math.log1p(self._worth(spec))
        sides = [Side(one.id, one) for one in (spec, other)]
        try:
            taken = take_turns(
                self._caller, sides, _OBJECTIVE, lambda turns, _: turns.high >= -worth and turns.low <= -worth
            )
        except LaunchFailed as error:
            if error.spec_id == spec.id:
                raise
            self._notes.append(f"{_difference(spec, other)} does not train: {error.failure.message}")
            return (), None, []
        mine, theirs = taken.wrong
        self._notes += [f"{_difference(spec, other)} is none: {line}" for line in theirs]
        own = [line for line in taken.troubles if line in mine or line not in theirs]
        return taken.before, taken.turns, own


def _line(words: str, turns: Turns) -> str:
    gain = math.expm1(-turns.log)
    word = "faster" if gain >= 0 else "slower"
    return f"{words} is now {formats.share(abs(gain))} {word} (±{formats.share(turns.wide)})"


def _difference(spec: TrainSpec, other: TrainSpec) -> str:
    """``attention=flash_attention_2``: what ``other`` has otherwise."""
    mine, theirs = spec.to_dict(), other.to_dict()
    return " ".join(f"{name}={value}" for name, value in theirs.items() if value != mine[name])
