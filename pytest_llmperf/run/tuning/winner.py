"""Winner: the end of a search, which shows that what it found is the best and sound; and whether it still is one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.objective import CLOSE, OBJECTIVES, Turns, turns_of
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.metrics import METRICS, RATE
from pytest_llmperf.records.result import CaseResult, Verdict, joined_reasons
from pytest_llmperf.run.case import Caller, Case, neighbours
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError, Concluded, DidNotTrainError
from pytest_llmperf.run.tuning.trials import InTurns, Trials, Tuning, lasting, take_turns
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec
from pytest_llmperf.support import formats

#: Of those that trials could not tell from the best, so many take turns with it at a time.
RIVALS, _LEAST_PAIRS = 3, 2
# Of what was shown to be no winner, so many are asked.
_WINNERS = 3
# Of two that take turns, each is launched for so many steps.
FULL_STEPS, _LEAST_STEPS = 16, 8
# Seconds: with less than that left, whatever ends was ended.
_NEXT_TO_NOTHING = 1.0
# Small trainings of a winner and of its plain form take so many seconds and launches at least, its own case so many
# launches. Those of what a trial has compiled take this share of it, since its kernels are kept.
_PARITY_SECONDS, _PARITY_LAUNCHES, CASE_LAUNCHES, _KEPT = 35.0, 2, 2, 0.5


def _is_compiled(spec: Spec) -> bool:
    return isinstance(spec, TrainSpec) and (spec.torch_compile or spec.attention == "flex_attention")


def proof_seconds(spec: Spec, each: float) -> float:
    """What the proofs of a winner take, a trial of which takes ``each``: its parity, and its own case."""
    each *= _KEPT if _is_compiled(spec) else 1.0
    return (0.0 if spec.is_script else max(_PARITY_SECONDS, _PARITY_LAUNCHES * each)) + CASE_LAUNCHES * each


def trial_seconds(spec: Spec, left: float, *, compiles: bool) -> float:
    """What a trial of one like ``spec`` may take, with so many seconds ``left``, lest it wins and none can prove it."""
    fixed, launches = (0.0, 0) if spec.is_script else (_PARITY_SECONDS, _PARITY_LAUNCHES)
    share = _KEPT if compiles else 1.0
    return min((left - fixed) / (1 + share * CASE_LAUNCHES), left / (1 + share * (CASE_LAUNCHES + launches)))


class Final:
    """The end of one search, until its time is over: the best in turns, the winner shown to be sound, and its choices.
    What its proofs take is kept for them: turns have what is left."""

    def __init__(self, caller: Caller, found: Tuning, until: float, tell: Callable[[str], None]) -> None:
        self._caller, self._found, self._until, self._tell = caller, found, until, tell
        self._kept, self._able, self._rounds = 0.0, list[Spec](), list[dict[Spec, Any]]()
        """Seconds kept for the winner's proofs; who may be the winner by turns; and of these a launch of each."""

    def decide(self, ranked: Sequence[Spec], fits: Callable[[Spec], bool]) -> None:
        """Find the winner: one of ``ranked``, best first. What its choices brought comes before the last of time."""
        found, found.winner = self._found, ranked[0]
        self._kept, self._able = proof_seconds(ranked[0], self._uncached_seconds(ranked[0])), [ranked[0], *found.rivals]
        if isinstance(ranked[0], TrainSpec):
            self._tell_rivals_apart(self._caller.run.settings.max_launches)
            self._without_each_choice(fits)
        self._tell_rivals_apart()
        self._kept = 0.0
        self._prove([found.winner, *(spec for spec in ranked if spec != found.winner)][:_WINNERS])
        if found.case is not None and not found.unsound:
            self._spend_what_is_left(found.case)

    def _tell_rivals_apart(self, most_rounds: float = math.inf) -> None:
        """By rounds of turns of the winner with its closest rivals, until none is left or no time."""
        found = self._found
        while found.rivals and len(self._rounds) < most_rounds:
            if (unfit := self._take_turns([found.winner, *found.rivals[:RIVALS]])) is None:
                return
            able = self._able = [one for one in self._able if one not in unfit]
            self._compare(able[0] if found.winner in unfit else found.winner)
            for one in able:  # the best so far, decided or not
                if (turns := found.compared.get((one, found.winner))) is not None and turns.log > 0:
                    self._compare(one)
            # Of one pair nobody knows how it scatters, nor what came of its order.
            told = [pair for pair, one in found.compared.items() if one.verdict and one.pairs >= _LEAST_PAIRS]
            found.rivals = [one for one in able if one != found.winner and (one, found.winner) not in told]

    def _without_each_choice(self, fits: Callable[[Spec], bool]) -> None:
        """The winner in turns with what lacks one of its choices; one that is better without it is the winner no more.
        A choice that was right beside others need not be right beside these."""
        found = self._found
        for _ in range(_WINNERS):
            winner = found.winner
            for axis in found.space.axes:
                try:
                    without = replace(winner, **{field: getattr(found.begun_at, field) for field in axis.fields})
                except SpecError:  # the winner's other choices need it
                    continue
                trial = found.trial_of(without)
                could_train = trial is None or trial.is_measured or bool(trial.disturbances)
                if without == winner or not could_train or not fits(without) or self._take_turns([winner, without]):
                    continue
                self._compare(winner)
                turns = found.compared.get((without, winner))
                if turns is not None and turns.low > 0:
                    self._compare(without)
                    break
            else:
                break

    def _compare(self, winner: Spec) -> None:
        """Have it as the winner, and say how it did beside each that took turns with it."""
        found, noise = self._found, self._caller.policy(winner).noise
        found.winner, found.compared, found.rivals = winner, {}, [one for one in found.rivals if one != winner]
        for other in dict.fromkeys(one for one in chain(*self._rounds) if one not in (winner, *found.unsound)):
            pairs = tuple((each[other], each[winner]) for each in self._rounds if {other, winner} <= each.keys())
            turns = turns_of(pairs, found.objective, noise, ends_anywhere=True) if pairs else None
            found.compared |= {(other, winner): turns} if turns is not None else {}

    def _take_turns(self, specs: Sequence[Spec]) -> Sequence[Spec] | None:
        """A launch of each, or as many of the first as there is time for; what of them cannot be, so that none counts.
        ``None``: time, or what is around them, lets no turns be."""
        notes, left = self._found.notes, self._left - self._kept
        while specs and left < sum(map(self._seconds_of, specs)):
            specs = specs[:-1]
        if not specs[1:]:
            return None
        self._tell(f"{', '.join(one.id for one in specs[1:])} in turns with {specs[0].id}")
        # What drifts slowly then weighs on all alike.
        order = [*specs] if len(self._rounds) % 2 == 0 else [*specs][::-1]
        try:
            taken = take_turns(self._caller, [_longer(one) for one in order], self._found.objective)
        except LaunchFailed as error:
            notes.append(str(error).splitlines()[0])
            is_over = self._left <= _NEXT_TO_NOTHING  # it was the time that ended it
            return None if is_over else [one for one in order if _longer(one).id == error.spec_id]
        if taken.troubles:
            wrong = [(one, line) for one, lines in zip(order, taken.wrong, strict=True) for line in lines]
            notes += [f"{one.id}: " + line.removeprefix(f"{one.id}: ") for one, line in wrong] or taken.troubles
            unfit = {one for one, _ in wrong}
            return [*unfit] if 0 < len(unfit) < len(order) else None
        self._rounds += [dict(zip(order, each, strict=True)) for each in taken.pairs]
        return ()

    def _prove(self, ranked: Sequence[Spec]) -> None:
        """The first of ``ranked`` that its proofs do not disprove."""
        found = self._found
        for winner in ranked:
            if not (disproof := self._disproved(winner)):
                return
            found.notes.append(f"{winner.id} was faster, and is no winner: {disproof}")
            found.unsound, found.parity, found.case = [*found.unsound, winner], None, None
        found.notes.append("none of the fastest configurations is sound")
        found.winner = None

    def _spend_what_is_left(self, case: Concluded) -> None:
        """In turns that are not decided. One that they show to be better is the winner if it is proved as well."""
        found, proven, parity = self._found, self._found.winner, self._found.parity
        why = unshown = "that is not shown, and proved, so far"
        try:
            self._tell_rivals_apart()
            turns = found.compared.get((proven, found.winner))
            if turns is not None and turns.verdict == "second" and not case.result.updated:
                why = self._disproved(found.winner) or why * (found.case is None)
        finally:
            if (ahead := found.winner) != proven and why:
                found.parity, found.case, found.unsound = parity, case, [ahead] * (why != unshown)
                self._compare(proven)  # the two need not have taken a turn together: one ahead of both may have been
                if (turns := found.compared.get((ahead, proven))) is None or turns.verdict != "tie":
                    found.notes.append(f"{ahead.id} was ahead in turns, and is no winner: {why}")
                    found.rivals += [ahead] * (not found.unsound)

    def _disproved(self, winner: Any) -> str:
        """What its proofs, as far as there is time for them, say against it."""
        self._compare(winner)
        self._found.parity = self._found.case = None
        proofs = ("case",) if winner.is_script else ("parity", "case")
        return next(filter(None, (self._disproof(proof, winner) for proof in proofs)), "")

    def _disproof(self, name: str, winner: Any) -> str:
        """Why a configuration is unsound, as far as there is time; empty of one that is sound, as a new case is, or one
        that has become slower. One that is invalid for what was around it alone is not at fault."""
        words, caller = "parity with its plain form" if name == "parity" else "its own case", self._caller
        if self._left < self._seconds_of(winner):
            self._found.notes.append(f"no time was left for {words}")
            return ""
        self._tell(f"{words} of {winner.id}")
        checks = caller.run.cases(caller.nodeid, caller.observer, caller.terms, caller.findings)
        try:
            # Steps of a script may be unlike, and those that are traced are to be those of its test.
            lasts = winner if winner.is_script else _longer(winner)
            answer = checks.same_training(winner) if name == "parity" else checks.check(lasts)
        except (CannotRunError, CaseFailedError) as error:
            why = f"{words}: {str(error).splitlines()[0]}"
            is_over = self._left <= _NEXT_TO_NOTHING  # then it was the time that ended it
            # What is refused of a command that has trained is how it is measured: its steps are too few, say.
            if isinstance(error, DidNotTrainError) and not is_over and (error.may_train_again or not winner.is_script):
                return why
            self._found.notes.append(f"too little time was left for {words}" if is_over else why)
            return ""
        setattr(self._found, name, answer)
        result, experience = answer.result, caller.run.stored.experience
        around = [validity.circumstances(launch, math.inf, experience).lines for launch in result.launches]
        is_spoilt = any(around) and result.reason == joined_reasons(dict.fromkeys(chain(*around)))
        return result.reason if result.verdict == "invalid" and not is_spoilt else ""

    def _seconds_of(self, spec: Spec) -> float:
        """The seconds that a launch takes; what a trial has compiled is kept."""
        is_kept = _is_compiled(spec) and self._found.trial_of(spec) is not None
        return max(3.0, self._uncached_seconds(spec) * (_KEPT if is_kept else 1.0)) + 5.0 * _is_compiled(spec)

    def _uncached_seconds(self, spec: Spec) -> float:
        """What its trial took, or the winner's, from which it differs by a choice, with a fifth and all steps to spare;
        without one, launches of this run."""
        trials = [trial for one in (spec, self._found.winner) if (trial := self._found.trial_of(one))]
        trial, spent = next((one for one in trials if one.is_measured), None), self._caller.findings.spent
        if trial is None:
            return 1.2 * sum(spent.phases.values()) / max(1, spent.launches)
        return 1.2 * (trial.wall_seconds + max(0, FULL_STEPS - trial.steps) * trial.step_seconds)

    @property
    def _left(self) -> float:
        return self._until - time.monotonic()


def _longer(spec: Spec) -> Spec:
    return lasting(spec, FULL_STEPS, _LEAST_STEPS, 3)


# Of ``perf.tune``: whether a configuration still is the best of its neighbours, each of which takes turns with it.
_THROUGHPUT = OBJECTIVES["throughput"]
# What is better by less is no reason to change anything; on a CPU, whose times are noise, what its gate holds.
_WORTH = 0.01


class Recheck:
    def __init__(self, caller: Caller, spec: TrainSpec, most: int) -> None:
        """``most`` neighbours take turns with it: those that were the fastest in a trial of their own."""
        self._caller, self._spec, self._most = caller, spec, most
        self._notes: list[str] = []
        self._num_spoilt = 0
        """Neighbours whose trials were spoilt twice by others."""

    def check(self, case: Case, space: Space) -> Concluded:
        """``improved`` where a neighbour is shown to be faster by 1 % (on a CPU, its tolerance), else ``pass``.
        ``inconclusive`` where others have spoilt trials, and no neighbour is left to take turns with."""
        caller, worth = self._caller, _WORTH
        if caller.run.on_cpu:
            worth = caller.policy(self._spec).tolerances.get(RATE, math.inf)
        self._notes += space.no_neighbours(self._spec)
        made, beside, troubles = list[InTurns](), dict[str, Turns](), list[str]()

        def goes_on(turns: Turns) -> bool:
            return turns.low <= -math.log1p(worth) <= turns.high

        for other in self._runners_up(neighbours(self._spec, space)):
            words = self._difference(other)
            try:
                taken = take_turns(caller, (self._spec, other), _THROUGHPUT, goes_on)
            except LaunchFailed as error:
                if error.spec_id == self._spec.id:
                    raise
                self._notes.append(f"{words} does not train: {error.failure.message}")
                continue
            mine, theirs = taken.wrong
            self._notes += [f"{words} is none: {line}" for line in theirs]
            troubles += [line for line in taken.troubles if line in mine or line not in theirs]
            made.append(taken)
            beside |= {words: taken.turns} if taken.turns else {}
        invalid = caller.result(case, "invalid", joined_reasons(troubles))
        result = invalid if troubles else self._judged(case, beside, worth)
        launches = tuple(before for taken in made for before, _ in taken.pairs)
        return Concluded(result=replace(result, launches=launches), held_against="turns with its neighbours")

    def _judged(self, case: Case, beside: Mapping[str, Turns], worth: float) -> CaseResult:
        """By how each neighbour did; another has to be faster by ``worth``, as a fraction."""
        faster = sorted((turns.log, words) for words, turns in beside.items() if turns.high < -math.log1p(worth))
        lines, notes, ratio = dict[str, str](), list[str](), METRICS["throughput_ratio"]
        for words, turns in beside.items():
            gain = formats.share(abs(math.expm1(-turns.log)))
            change = f"{gain} {'slower' if turns.log > 0 else 'faster'} (±{formats.share(turns.wide)})"
            lines[words] = f"{words} is now {change}"
        verdict: Verdict = "pass"
        reason = f"still the fastest: {len(beside)} of its neighbours took turns with it"
        if faster:
            verdict, reason = "improved", joined_reasons(lines.pop(words) for _, words in faster)
            notes.append(f"to take it, give the test {faster[0][1]}, or what llmperf tune finds anew")
        elif self._num_spoilt and not beside:  # to pass would say that something was compared
            verdict = "inconclusive"
            reason = f"none of its neighbours took turns with it: the trials of {self._num_spoilt} were spoilt twice"
        elif not beside:
            reason = "still the fastest: no neighbour trains and comes near enough for turns"
        notes += [*lines.values(), *self._notes]
        if self._caller.run.on_cpu:
            notes.append(
                f"a CPU's times are noise: a neighbour counts as faster from {1 + worth:g} times on; "
                "set perf_throughput_tolerance, e.g. to 0.3, on a quiet machine"
            )
        checks = tuple(ratio.check(math.exp(-turns.log), detail=words) for words, turns in beside.items())
        result = self._caller.result(case, verdict, reason, checks)
        return replace(result, notes=(*notes, *result.notes))

    def _runners_up(self, others: Sequence[TrainSpec]) -> list[TrainSpec]:
        """The fastest of ``others``; each has a trial first where there are more than take turns."""
        spec, able, notes = self._spec, list[TrainSpec](), self._notes
        for other in others:
            if why := self._caller.why_not(other):
                notes.append(f"{self._difference(other)} was not tried: {why}")
            else:
                able.append(other)
        if others and not able:  # to pass would say that something was compared
            raise CannotRunError(f"{spec.id}: none of its neighbours can be tried: {'; '.join(notes)}")
        if len(able) <= self._most:
            return able
        trials, logs = Trials(self._caller), dict[TrainSpec, float]()
        for other in (spec, *able):
            trial, words = trials.make(other), self._difference(other)
            trial = trials.make(other) if trial.disturbances else trial  # others have spoilt it
            log = _THROUGHPUT.log_of(trial) if trial.ranks else None
            if log is not None:
                logs[other] = log
            elif other != spec and trial.disturbances:
                self._num_spoilt += 1
                notes.append(f"the trial of {words} was spoilt twice: {trial.disturbances[0]}")
            elif other != spec:
                notes.append(f"{words} does not train: {trial.kind}: {trial.failure}")
        own = logs.pop(spec, math.inf)
        ranked = sorted(logs, key=lambda other: logs[other])
        near = [other for other in ranked if logs[other] <= own + 2 * CLOSE]
        if far := ranked[len(near) :]:  # turns with those would decide nothing
            slower = f"{self._difference(far[0])}, at {formats.percent(math.expm1(own - logs[far[0]]))}"
            notes.append(f"{len(far)} others are too slow for turns, the fastest {slower} in a trial")
        return near[: self._most]

    def _difference(self, other: TrainSpec) -> str:
        """``attention=flash_attention_2``: what ``other`` has otherwise."""
        mine, theirs = self._spec.to_dict(), other.to_dict()
        return " ".join(f"{name}={value}" for name, value in theirs.items() if value != mine[name])
