"""Bisection: one search, from its two ends to the first bad candidate, each launched in turns with the good end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from pytest_llmperf.analysis.step_difference import points_to, step_difference
from pytest_llmperf.judge.pairs import (
    By,
    Change,
    Look,
    Side,
    Yardstick,
    compared_ends,
    criteria,
    exact_differences,
    side_of,
)
from pytest_llmperf.judge.verdict import Judgement
from pytest_llmperf.launch.histories import GitHistory, History, NoRoomError, NotMadeError, Span
from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.result import Candidate
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.findings import CaseFailedError
from pytest_llmperf.run.paired_comparison import PairedComparison, Pairs
from pytest_llmperf.run.paired_comparison import Side as Turn
from pytest_llmperf.run.search_store import PairStore, surroundings
from pytest_llmperf.settings.spec import Spec

#: How often all of a bisection's decisions together may be wrong.
ALPHA = 0.05
# A change below so many standard deviations of a pair is often seen larger than it is, where it is seen at all.
_CLEAR = 2.0
# Seconds: with less than that left, whatever ends was ended by the clock.
_NEXT_TO_NOTHING = 1.0


@dataclass(frozen=True, kw_only=True)
class BisectionOrder:
    by: By | None = None
    """``None``: by the first in which the ends differ."""
    seconds: float = 3600.0
    max_pairs: int = 8
    """In one comparison at most; the run's settings allow as many launches of a side."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One candidate, beside the good end."""

    candidate: Candidate
    side: Side | None
    """``None``: its comparison was broken off."""
    pairs: int = 0
    change: Change | None = None
    exact: tuple[str, ...] = ()
    """What is counted, or else exact, and is not as at the good end."""
    reason: str = ""
    kept: bool = False
    """Whether no launch was needed for it, since an earlier run had made them."""


@dataclass(frozen=True, kw_only=True)
class Bisection:
    good: Candidate
    bad: Candidate
    num_candidates: int
    """After the good end, the bad one included."""
    yardstick: Yardstick | None = None
    """``None``: the ends do not differ, or it is not known."""
    steps: tuple[Step, ...] = ()
    """The bad end's first."""
    suspects: tuple[Candidate, ...] = ()
    """Those that may be the first bad one; one, if it was found."""
    last_good: Candidate | None = None
    change: Change | None = None
    """The step times of the first bad one over those of the last good one."""
    exact: tuple[str, ...] = ()
    """What else is exact and changed between the two."""
    diagnosis: str = ""
    confidence: float = 0.0
    """At least, that the first bad one is among the suspects."""
    ended: str = ""
    """What ended it before its end: ``time`` or ``interrupted``."""
    notes: tuple[str, ...] = ()

    @property
    def first_bad(self) -> Candidate | None:
        """``None``: none, or several may be it."""
        return self.suspects[0] if len(self.suspects) == 1 and self.yardstick else None


class Bisector:
    """One case and one history: candidates in turns with the good end, each until it is decided."""

    def __init__(
        self, caller: Caller, spec: Spec, order: BisectionOrder, history: History, watch: Callable[[str], None]
    ) -> None:
        self._caller, self._spec, self._order, self._history, self._watch = caller, spec, order, history, watch
        self._policy, self._steps = caller.policy(spec), list[Step]()
        self._pairs: dict[str, Pairs] = {}
        """By the candidate's name; the good end's launch is the first of each."""
        self._good_turn: Turn | None = None
        self._ended = ""
        """``time``, once there is none for another pair."""
        self._notes: tuple[str, ...] = ()

    def run(self, span: Span) -> Bisection:
        """Search between the ends of ``span`` until one is left, or none can tell more, or time is over.
        ``CaseFailedError``: an end cannot be launched, or another process does the same."""
        run, self._good = self._caller.run, span.good
        run.until = time.monotonic() + self._order.seconds
        where = [run.machine_kind, sorted(gpu.uuid for gpu in run.gpus)]
        self._store = PairStore([self._spec.to_dict(), self._history.key, span.good.name, *surroundings(), *where])
        self._store.take()
        try:
            return self._searched(span)
        finally:
            self._store.release()

    def _searched(self, span: Span) -> Bisection:
        lineage = Lineage(span.candidates)
        # One is of the ends, and skipped ones may make the halves uneven by one.
        alpha = ALPHA / (most_steps(len(span.candidates)) + 2)
        found = Bisection(good=span.good, bad=lineage.bad, num_candidates=len(span.candidates), notes=span.notes)
        if why := self._store.unkept:
            self._notes = (f"what is measured cannot be kept ({why}): a second run begins anew",)
        ended = ""
        try:
            yardstick = self._ends(lineage.bad, alpha)
            found = replace(found, yardstick=yardstick)
            if yardstick is not None:
                found = replace(found, notes=(*found.notes, *self._caution(yardstick)))
                self._divide(lineage, yardstick, alpha)
        except KeyboardInterrupt:
            ended = "interrupted"
        notes = (*found.notes, *self._notes)
        found = replace(found, steps=tuple(self._steps), ended=ended or self._ended, notes=notes)
        return found if found.yardstick is None else self._concluded(found, lineage, alpha)

    def _ends(self, bad: Candidate, alpha: float) -> Yardstick | None:
        self._watch(f"the ends: {self._good.shown} (good) and {bad.shown} (bad), in turns")
        yardstick: list[Yardstick | None] = [None]
        order = criteria(self._order.by, on_cpu=self._caller.run.on_cpu)

        def decide(pairs: Pairs) -> Look:
            told = compared_ends(pairs, self._policy, order, alpha=alpha, budget=self._order.max_pairs)
            yardstick[0] = told.yardstick
            return Look(told.goes_on, "bad" if told.yardstick else None)

        step = self._compared(bad, decide, is_end=True)
        self._steps.append(step)
        if step.side == "skipped":
            raise CaseFailedError(f"--bad {bad.shown}: {step.reason}")
        return yardstick[0]

    def _caution(self, yardstick: Yardstick) -> list[str]:
        on_cpu, found = self._caller.run.on_cpu, []
        if yardstick.by != "speed":
            told = "step times are by a CPU's clock, which shows its other work too: they decided nothing here"
            return [told] if on_cpu else []
        if on_cpu:
            found.append("a CPU's clock shows its other work too: see whether --by counts tells the ends apart")
        if abs(yardstick.size) < _CLEAR * yardstick.error * math.sqrt(self._steps[0].pairs):
            why = "the ends are hardly further apart than one pair scatters, and chance may have enlarged that"
            found.append(f"{why}: its answer is worth little without --max-pairs {4 * self._order.max_pairs}")
        return found

    def _divide(self, lineage: Lineage, yardstick: Yardstick, alpha: float) -> None:
        def decide(pairs: Pairs) -> Look:
            return side_of(pairs, yardstick, self._policy, alpha=alpha, budget=self._order.max_pairs)

        while not self._ended and (candidate := lineage.following(self._sides)) is not None:
            num = len(lineage.suspects(self._sides))
            self._watch(f"step {len(self._steps)}, about {most_steps(num)} left of {num} suspects: {candidate.told}")
            step = self._compared(candidate, decide)
            self._steps.append(step)
            why = f": {step.reason}" if step.reason else ""
            self._watch(f"{candidate.shown}: {step.side or 'not decided'}{why}")

    @property
    def _sides(self) -> dict[str, Side]:
        return {step.candidate.name: step.side for step in self._steps if step.side is not None}

    def _concluded(self, found: Bisection, lineage: Lineage, alpha: float) -> Bisection:
        # What is counted has no noise to be wrong by.
        is_noisy = found.yardstick is not None and found.yardstick.by == "speed"
        decided = sum(step.side in ("good", "bad") for step in found.steps) if is_noisy else 0
        suspects = lineage.suspects(self._sides)
        found = replace(found, suspects=suspects, confidence=1 - min(1.0, alpha * decided))
        if (first_bad := found.first_bad) is None:
            return found
        name = lineage.before(first_bad, self._sides)
        last_good = next((one for one in lineage.candidates if one.name == name), found.good)
        pairs = self._pairs.get(first_bad.name)
        others = self._pairs.get(last_good.name) if name else pairs  # the good end was launched beside it
        if not pairs or not others:
            return replace(found, last_good=last_good)
        now, then = pairs[-1][1], others[-1][1 if name else 0]
        changes = {step.candidate.name: step.change for step in reversed(self._steps)}
        change = changes.get(first_bad.name)
        return replace(
            found,
            last_good=last_good,
            change=change and change.since(changes.get(name or "")),
            exact=(*exact_differences(then, now, self._policy), *then.differences(now)),
            diagnosis=points_to(step_difference(then.trace, now.trace)) if then.trace and now.trace else "",
        )

    def _compared(self, candidate: Candidate, decide: Callable[[Pairs], Look], *, is_end: bool = False) -> Step:
        """By as many pairs as it takes to ``decide``; one that ``is_end`` is always tried."""
        known = self._store.known(candidate.name)
        if known.pairs:
            self._pairs[candidate.name] = known.pairs
            told = decide(known.pairs)
            if not told.goes_on:
                return self._step(candidate, told, kept=True)
        if known.failure and not is_end:
            return Step(candidate=candidate, side="skipped", reason=known.failure, kept=True)
        try:
            return self._launched(candidate, decide, known.pairs)
        except NoRoomError as error:
            raise CaseFailedError(f"{candidate.shown}: {error}; free some: the same command goes on") from None
        except NotMadeError as error:
            return Step(candidate=candidate, side="skipped", reason=str(error))

    def _launched(self, candidate: Candidate, decide: Callable[[Pairs], Look], kept: Pairs) -> Step:
        if self._left <= _NEXT_TO_NOTHING:
            return self._out_of_time(candidate, "no time was left for it")
        try:
            self._good_turn = self._good_turn or self._turn(self._good)
        except NotMadeError as error:
            raise CaseFailedError(f"--good {self._good.shown}: {error}") from None
        sides = [self._good_turn, self._turn(candidate)]
        answers, wrong = [Look(goes_on=True)], list[str]()
        begun = time.monotonic()

        def judge(pairs: Pairs, troubles: Sequence[str]) -> Judgement:
            wrong[:] = troubles
            if troubles:
                return Judgement("invalid", "", ())
            self._pairs[candidate.name] = pairs
            self._store.keep(candidate.name, pairs)
            answers[0] = decide(pairs)
            of_a_pair = (time.monotonic() - begun) / max(1, len(pairs) - len(kept))
            if answers[0].goes_on and self._left < of_a_pair:
                self._ended = "time"
            return Judgement("pass", "", (), undecided=answers[0].goes_on and not self._ended)

        comparison = PairedComparison(self._caller, self._spec)
        try:
            turns = comparison.take_turns(sides, judge, kept)
        except LaunchFailed as error:
            return self._failed(candidate, error.failure)
        if wrong and comparison.troubles(sides[0], turns.before):
            raise CaseFailedError(f"--good {self._good.shown}: {wrong[0]}")
        if wrong:
            return self._skipped(candidate, wrong[0])
        self._notes += tuple(note for note in turns.notes if note not in self._notes)
        return self._step(candidate, answers[0])

    def _failed(self, candidate: Candidate, failure: Failure) -> Step:
        if self._left <= _NEXT_TO_NOTHING:
            return self._out_of_time(candidate, "time was over")
        reason = "; logs: ".join(filter(None, [failure.reason, failure.folder]))  # what is refused early has none
        if failure.message.endswith(f"(under {self._good.shown})"):
            raise CaseFailedError(f"--good {self._good.shown}: {reason}")
        if failure.kind == "unwritable":  # no other candidate would fare better
            raise CaseFailedError(reason)
        return self._skipped(candidate, reason, lasts=failure.kind in {"error", "refused"})

    def _out_of_time(self, candidate: Candidate, reason: str) -> Step:
        self._ended = "time"
        return Step(candidate=candidate, side=None, reason=reason)

    def _skipped(self, candidate: Candidate, reason: str, *, lasts: bool = True) -> Step:
        if lasts:  # another attempt ends the same way; a timeout, or memory that a neighbour had, need not
            self._store.keep(candidate.name, (), reason)
        return Step(candidate=candidate, side="skipped", reason=reason)

    def _step(self, candidate: Candidate, told: Look, *, kept: bool = False) -> Step:
        pairs = self._pairs[candidate.name]
        return Step(
            candidate=candidate,
            side=None if told.goes_on else told.side,
            pairs=len(pairs),
            change=Change.of(pairs, self._policy),
            exact=exact_differences(*pairs[-1], self._policy),
            reason=told.reason,
            kept=kept,
        )

    def _turn(self, candidate: Candidate) -> Turn:
        self._watch(f"{candidate.shown}: its environment")
        shown = f"at {candidate.shown}"
        if self._spec.is_script and isinstance(self._history, GitHistory):  # the code that trains is the project's
            return Turn(name=candidate.shown, spec=self._spec, side=shown, tree=self._history.tree(candidate.name))
        return Turn(name=candidate.shown, spec=self._spec, side=shown, python=self._history.python(candidate))

    @property
    def _left(self) -> float:
        return self._caller.run.until - time.monotonic()


# Lineage: which candidates may still be the first bad one, and which of them tells most of the others.


class Lineage:
    """The candidates after the good end, each after its parents; the last is the bad end. It need not be a line: of a
    merge each parent's ancestors are its own. A set of candidates is an int, a bit each."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = tuple(candidates)
        self._number = {one.name: index for index, one in enumerate(self.candidates)}
        self._until: list[int] = []
        for index, one in enumerate(self.candidates):
            known = (self._until[self._number[name]] for name in one.parents if name in self._number)
            self._until.append(reduce(or_, known, 1 << index))

    @property
    def bad(self) -> Candidate:
        return self.candidates[-1]

    def suspects(self, sides: Mapping[str, Side]) -> tuple[Candidate, ...]:
        """Those that may be the first bad one, the oldest first."""
        return tuple(self.candidates[index] for index in _indices(self._suspected(sides)))

    def following(self, sides: Mapping[str, Side]) -> Candidate | None:
        """The suspect that divides them best; ``None`` where no other launch can tell more."""
        suspected = self._suspected(sides)
        total = suspected.bit_count()
        bad = [self._number[name] for name, side in sides.items() if side == "bad" and name in self._number]
        newest = min(bad, key=lambda index: self._until[index].bit_count(), default=len(self.candidates) - 1)
        open_ones = [i for i in _indices(suspected) if i != newest and self.candidates[i].name not in sides]
        halves = {index: (self._until[index] & suspected).bit_count() for index in open_ones}
        best = max(open_ones, key=lambda index: min(halves[index], total - halves[index]), default=None)
        return None if best is None else self.candidates[best]

    def before(self, first_bad: Candidate, sides: Mapping[str, Side]) -> str | None:
        """A good candidate that has all that ``first_bad`` follows, its parent if possible; ``None``: the good end."""
        good = [name for name, side in sides.items() if side == "good" and name in self._number]
        for parent in (self._number[name] for name in first_bad.parents if name in self._number):
            if holders := [name for name in good if self._until[self._number[name]] >> parent & 1]:
                return min(holders, key=lambda name: self._number[name] != parent)
        return None

    def _suspected(self, sides: Mapping[str, Side]) -> int:
        found = self._until[-1]
        for name, side in sides.items():
            if name in self._number and side != "skipped":
                until = self._until[self._number[name]]
                found &= until if side == "bad" else ~until
        return found


def most_steps(num_suspects: int) -> int:
    """Comparisons that a line of so many suspects needs: half of them remain after each."""
    return max(0, num_suspects - 1).bit_length()


def _indices(members: int) -> list[int]:
    return [index for index in range(members.bit_length()) if members >> index & 1]
