"""Final: the end of a search: the best in turns, the winner shown to be sound, what each of its choices brought."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.tuning import Turns
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.result import joined_reasons
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.cases import Cases
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError, Concluded, DidNotTrainError
from pytest_llmperf.run.paired_comparison import Side
from pytest_llmperf.run.tuning.trials import NEEDED, Compared, Share, Tuning, TuningOrder, take_turns
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec

# Of those that trials could not tell apart, so many take turns.
_FINALISTS = 3
# Of two that take turns, each is launched for so many steps.
FULL_STEPS, _LEAST_STEPS = 16, 8
# Of a winner that was shown not to be one, so many more are looked at.
_WINNERS = 3
# Two trials are told apart no better than this, as a fraction, however steady the steps of each.
_TRIALS_WIDE = 0.02
# Seconds: with less than that left, whatever ends was ended.
_NEXT_TO_NOTHING = 1.0
# What small trainings of a winner and of its plain form take, and the launches of its own case.
_PARITY_SECONDS, _CASE_LAUNCHES = 35.0, 2
_WORDS = {"same_training": "parity with its plain form", "check": "its own case"}


def proof_seconds(each: float) -> float:
    """What the proofs of a winner take, a launch of which takes ``each``: its parity, and its own case."""
    return _PARITY_SECONDS + _CASE_LAUNCHES * each


@dataclass(frozen=True)
class _Unfit:
    """One of two that took turns did not train, or not as it was asked to; a note says why."""

    is_first: bool


class Final:
    """The end of one search, until its time is over: the best in turns, the winner shown to be sound, and its choices.

    What its proofs take is kept for them: turns have what is left.
    """

    def __init__(self, caller: Caller, order: TuningOrder, until: float, tell: Callable[[str], None]) -> None:
        self._caller, self._order, self._until, self._tell = caller, order, until, tell
        self._notes: list[str] = []
        self._kept = 0.0
        """Seconds that are kept for the winner's proofs."""
        self._so_far: Tuning | None = None

    @property
    def so_far(self) -> Tuning | None:
        """What is known where it is ended, by Ctrl-C say; ``None`` before anything is."""
        return None if self._so_far is None else replace(self._so_far, notes=(*self._so_far.notes, *self._notes))

    def decided(
        self, tuning: Tuning, ranked: Sequence[TrainSpec], fits: Callable[[TrainSpec], bool], *, num_close: int
    ) -> Tuning:
        """``tuning`` with its winner: one of ``ranked``, best first, the first ``num_close`` close to one another.

        ``fits``: whether the memory of a configuration is enough.
        """
        self._kept = proof_seconds(self._seconds_of(ranked[0])) if self._order.proves else 0.0
        tuning = self._best_of(tuning, ranked[: min(num_close, _FINALISTS)])
        if tuning.winner is not None:
            tuning = self._without_each_choice(tuning, tuning.winner, fits)
        self._kept = 0.0
        if self._order.proves:
            tuning = self._proved(tuning, ranked)
        return replace(tuning, notes=(*tuning.notes, *self._notes))

    def _best_of(self, tuning: Tuning, finalists: Sequence[TrainSpec]) -> Tuning:
        best, ties, compared = finalists[0], list[TrainSpec](), list[Compared]()
        for other in finalists[1:]:
            turns = self._turns(best, other)
            if isinstance(turns, _Unfit):
                best = other if turns.is_first else best
                continue
            if turns is None:
                self._notes.append(f"{other.id} was as fast in its trial, and no turns with it were possible in time")
                ties.append(other)
                continue
            compared.append(Compared(best, other, turns))
            if turns.verdict == "second":
                best, ties = other, []
            elif turns.verdict != "first":
                ties.append(other)
            self._noted(replace(tuning, winner=best, ties=tuple(ties), compared=tuple(compared)))
        return self._noted(replace(tuning, winner=best, ties=tuple(ties), compared=tuple(compared)))

    def _without_each_choice(self, tuning: Tuning, winner: TrainSpec, fits: Callable[[TrainSpec], bool]) -> Tuning:
        """Find what each of the winner's choices brought; one that is better without one of them is not the winner yet.

        A choice that was right beside others need not be right beside these.
        """
        for _ in range(_WINNERS):
            shares = dict(self._shares(tuning, winner, fits))
            harmful = next((one for one in shares if one.how == "turns" and one.log - one.wide > 0), None)
            if harmful is None:
                return self._noted(replace(tuning, winner=winner, shares=tuple(shares)))
            compared = Compared(winner, shares[harmful], Turns(-harmful.log, harmful.wide, 1))
            winner = shares[harmful]
            tuning = self._noted(replace(tuning, winner=winner, compared=(*tuning.compared, compared), ties=()))
        return replace(tuning, winner=winner, shares=())

    def _shares(
        self, tuning: Tuning, winner: TrainSpec, fits: Callable[[TrainSpec], bool]
    ) -> Iterator[tuple[Share, TrainSpec]]:
        """What each of the winner's choices brought over the one that the search began with, and what has that one."""
        axes = self._order.space.axes
        before, after = (self._order.space.choices_of(spec) for spec in (tuning.begun_at, winner))
        for axis in axes:
            then, now = before.get(axis.name, ""), after.get(axis.name, "")
            if then == now:
                continue
            try:
                without = replace(winner, **{field: getattr(tuning.begun_at, field) for field in axis.fields})
            except SpecError:  # the winner's other choices need it
                continue
            if not fits(without):
                yield Share(axis.name, then, now, 0.0, 0.0, NEEDED), without
                continue
            trials = tuning.trial_of(without), tuning.trial_of(winner)
            could_train = trials[0] is None or trials[0].is_measured or bool(trials[0].disturbances)
            turns = self._turns(without, winner, most=1) if could_train else None
            if isinstance(turns, Turns):
                yield Share(axis.name, then, now, turns.log, turns.wide, "turns"), without
                continue
            known = [one for one in trials if one is not None and one.ranks]
            logs = [log for one in known if (log := self._order.objective.log_of(one)) is not None]
            if len(logs) == len(trials):
                wide = max(_TRIALS_WIDE, 2 * math.hypot(*(one.step_error for one in known)))
                yield Share(axis.name, then, now, logs[1] - logs[0], wide, "trials"), without

    def _noted(self, tuning: Tuning) -> Tuning:
        self._so_far = tuning
        return tuning

    def _turns(self, first: TrainSpec, second: TrainSpec, most: int = 0) -> Turns | _Unfit | None:
        """The second beside the first, or which of them cannot be; ``None`` where nothing is shown in the time left."""
        cost = self._seconds_of(first) + self._seconds_of(second)
        if self._left - self._kept < cost:
            return None
        self._tell(f"{second.id} in turns with {first.id}")

        def goes_on(turns: Turns, pairs: int) -> bool:
            return not turns.verdict and pairs != most and self._left - self._kept > 1.1 * cost

        sides = [Side(spec.id, _longer(spec)) for spec in (first, second)]
        try:
            taken = take_turns(self._caller, sides, self._order.objective, goes_on)
        except LaunchFailed as error:
            self._notes.append(str(error).splitlines()[0])
            # else it was the time that ended it
            return _Unfit(error.spec_id == sides[0].spec.id) if self._left > _NEXT_TO_NOTHING else None
        if not taken.troubles:
            return taken.turns
        mine, theirs = map(bool, taken.wrong)
        whose = f"{(first if mine else second).id}: "
        self._notes += [whose + line.removeprefix(whose) for line in taken.troubles]
        return _Unfit(is_first=mine) if mine != theirs else None

    def _proved(self, tuning: Tuning, ranked: Sequence[TrainSpec]) -> Tuning:
        """The winner with its proofs; where they say that it is none, the next with its own."""
        others = [spec for spec in ranked if spec != tuning.winner]
        for _ in range(_WINNERS):
            winner = tuning.winner
            if winner is None:
                break
            self._noted(tuning)
            parity = self._asked(winner, "same_training")
            shown = replace(tuning, parity=parity if isinstance(parity, Concluded) else None)
            self._noted(shown)
            disproof, case = self._disproof(parity), None
            if not disproof:
                case = self._asked(winner, "check")
                disproof = self._disproof(case)
            if not disproof:
                return replace(shown, case=case if isinstance(case, Concluded) else None)
            self._notes.append(f"{winner.id} was faster, and is no winner: {disproof}")
            following = others.pop(0) if others else None
            ties = tuple(one for one in tuning.ties if one != following)
            tuning = replace(tuning, winner=following, shares=(), ties=ties)
        return replace(tuning, winner=None, notes=(*tuning.notes, "none of the fastest configurations is sound"))

    def _asked(self, winner: TrainSpec, what: str) -> Concluded | str | None:
        """Ask ``Cases`` for ``what``; its answer, or why the winner failed at it; ``None``: that could not be asked."""
        if self._left < self._seconds_of(winner):
            self._notes.append(f"no time was left for {_WORDS[what]}")
            return None
        self._tell(f"{_WORDS[what]} of {winner.id}")
        checks = Cases(self._caller)
        try:
            return checks.same_training(winner) if what == "same_training" else checks.check(_longer(winner))
        except (CannotRunError, CaseFailedError) as error:
            why = f"{_WORDS[what]}: {str(error).splitlines()[0]}"
            is_over = self._left <= _NEXT_TO_NOTHING  # then it was the time that ended it
            if isinstance(error, DidNotTrainError) and not is_over:
                return why
            self._notes.append(f"too little time was left for {_WORDS[what]}" if is_over else why)
            return None

    def _disproof(self, answer: Concluded | str | None) -> str:
        """Why a configuration is unsound; empty of one that is sound, as a new case is, or one that has become slower.

        One that is invalid for what was around it alone is not at fault.
        """
        if not isinstance(answer, Concluded):
            return answer or ""
        result, experience = answer.result, self._caller.run.experience
        around = [validity.circumstances(launch, math.inf, experience).lines for launch in result.launches]
        is_spoilt = any(around) and result.reason == joined_reasons(dict.fromkeys(chain(*around)))
        return result.reason if result.verdict == "invalid" and not is_spoilt else ""

    def _seconds_of(self, spec: TrainSpec) -> float:
        """Return the seconds that a launch takes at most, by those of this run."""
        spent = self._caller.findings.spent
        each = sum(spent.phases.values()) / max(1, spent.launches)
        return max(3.0, 1.5 * each) + (5.0 if spec.torch_compile else 0.0)

    @property
    def _left(self) -> float:
        return self._until - time.monotonic()


def _longer(spec: TrainSpec) -> TrainSpec:
    return replace(spec, steps=FULL_STEPS, min_steps=_LEAST_STEPS, warmup_steps=3)
