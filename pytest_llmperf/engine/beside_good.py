"""BesideGood: candidates in turns with the good end, each until it is decided, with what earlier runs have kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pytest_llmperf.engine.bisection import Change, Step
from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.engine.paired_comparison import PairedComparison, Pairs, Side
from pytest_llmperf.engine.runner import Runner
from pytest_llmperf.judge.exact import changes, count_of
from pytest_llmperf.judge.stats import paired_difference, quantile
from pytest_llmperf.judge.verdict import Judgement
from pytest_llmperf.judge.yardstick import Look
from pytest_llmperf.launch.candidates import History, NoRoomError, NotMadeError
from pytest_llmperf.records.candidate import Candidate
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, counts
from pytest_llmperf.run.errors import CaseFailedError
from pytest_llmperf.run.pair_store import PairStore
from pytest_llmperf.run.trial_store import surroundings
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats

Decide = Callable[[Pairs], Look]

# Another attempt ends the same way; a timeout, or memory that a neighbour had, need not.
_LASTING = frozenset({"error", "refused"})

# Two-sided confidence in an interval that is shown.
_INTERVAL = 0.975
# Seconds: with less than that left, whatever ends was ended by the clock.
_NEXT_TO_NOTHING = 1.0


class BesideGood:
    """Of one case; alone with what it keeps while it is entered."""

    def __init__(
        self, caller: Caller, spec: TrainSpec, history: History, good: Candidate, watch: Callable[[str], None]
    ) -> None:
        self._caller, self._spec, self._history, self.good, self._watch = caller, spec, history, good, watch
        context, self._policy = caller.context, caller.policy(spec)
        where = [context.machine_kind, sorted(gpu.uuid for gpu in context.gpus)]
        self._store = PairStore([spec.to_dict(), history.key, good.name, *surroundings(), *where])
        self._pairs: dict[str, Pairs] = {}
        self._good_python = ""
        self.ended = ""
        """``time``, once there is none for another pair."""
        self.notes: tuple[str, ...] = ()

    def __enter__(self) -> BesideGood:  # noqa: PYI034 - typing has no Self before Python 3.11
        self._store.take()
        if self._store.unkept:
            self.notes = (f"what is measured cannot be kept ({self._store.unkept}): a second run begins anew",)
        return self

    def __exit__(self, *_error: object) -> None:
        self._store.release()

    def newest(self, name: str) -> Launch | None:
        """The newest launch of the candidate ``name``."""
        pairs = self._pairs.get(name)
        return pairs[-1][1] if pairs else None

    def newest_good(self, name: str) -> Launch | None:
        """The good end's beside it."""
        pairs = self._pairs.get(name)
        return pairs[-1][0] if pairs else None

    def compared(self, candidate: Candidate, decide: Decide, *, is_end: bool = False) -> Step:
        """What ``decide`` says of ``candidate``, by as many pairs as it takes; one that ``is_end`` is always tried.

        Raises:
            CaseFailedError: the good end cannot be launched, or the disk is full.
        """
        known = self._store.known(candidate.name)
        kept = known.pairs
        if kept:
            self._pairs[candidate.name] = kept
            told = decide(kept)
            if not told.goes_on:
                return self._step(candidate, told, was_kept=True)
        if known.failure and not is_end:
            return Step(candidate=candidate, side="skipped", reason=known.failure, was_kept=True)
        try:
            return self._launched(candidate, decide, kept)
        except NoRoomError as error:
            raise CaseFailedError(f"{candidate.shown}: {error}; free some: the same command goes on") from None
        except NotMadeError as error:
            return Step(candidate=candidate, side="skipped", reason=str(error))

    def _launched(self, candidate: Candidate, decide: Decide, kept: Pairs) -> Step:
        if self._left <= _NEXT_TO_NOTHING:
            self.ended = "time"
            return Step(candidate=candidate, side=None, reason="no time was left for it")
        sides = [self._good(), self._side(candidate)]
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
                self.ended = "time"
            return Judgement("pass", "", (), undecided=answers[0].goes_on and not self.ended)

        comparison = PairedComparison(self._caller, Runner(self._caller), self._spec)
        try:
            turns = comparison.take_turns(sides, judge, kept)
        except LaunchFailed as error:
            return self._failed(candidate, error)
        if wrong:
            return self._contradicted(candidate, wrong, bool(comparison.troubles(sides[0], turns.before)))
        self.notes += tuple(note for note in turns.notes if note not in self.notes)
        return self._step(candidate, answers[0])

    def _failed(self, candidate: Candidate, error: LaunchFailed) -> Step:
        if self._left <= _NEXT_TO_NOTHING:
            self.ended = "time"
            return Step(candidate=candidate, side=None, reason="time was over")
        reason = f"{error.failure.reason}; logs: {error.failure.folder}"
        if error.failure.message.endswith(f"(under {self.good.shown})"):
            raise CaseFailedError(f"--good {self.good.shown}: {reason}")
        if error.failure.kind == "unwritable":  # no other candidate would fare better
            raise CaseFailedError(reason)
        return self._skipped(candidate, reason, lasts=error.failure.kind in _LASTING)

    def _contradicted(self, candidate: Candidate, troubles: list[str], by_good: bool) -> Step:
        if by_good:
            raise CaseFailedError(f"--good {self.good.shown}: {troubles[0]}")
        return self._skipped(candidate, troubles[0])

    def _skipped(self, candidate: Candidate, reason: str, *, lasts: bool = True) -> Step:
        if lasts:
            self._store.keep(candidate.name, (), reason)
        return Step(candidate=candidate, side="skipped", reason=reason)

    def _step(self, candidate: Candidate, told: Look, *, was_kept: bool = False) -> Step:
        pairs = self._pairs[candidate.name]
        difference = paired_difference(pairs, self._policy.noise)
        wide = quantile(_INTERVAL, difference.df) * difference.error
        return Step(
            candidate=candidate,
            side=None if told.goes_on else told.side,
            pairs=len(pairs),
            change=Change(difference.log, difference.log - wide, difference.log + wide),
            exact=self.exact_differences(*pairs[-1]),
            reason=told.reason,
            was_kept=was_kept,
        )

    def exact_differences(self, then: Launch, now: Launch) -> tuple[str, ...]:
        """What is counted, or else exact, of ``now`` that is not as it was ``then``; memory beyond its tolerance."""
        found = []
        for metric in counts():
            a, b = count_of(then, metric), count_of(now, metric)
            if a is not None and b is not None and a != b:
                found.append(f"{metric.removesuffix('_per_step')}: {a:g} -> {b:g}")
        tolerance = self._policy.in_pairs().tolerances[MEMORY]
        if abs(now.peak_reserved_bytes - then.peak_reserved_bytes) > tolerance * then.peak_reserved_bytes:
            memory = " -> ".join(formats.memory(launch.peak_reserved_bytes) for launch in (then, now))
            found.append(f"peak memory: {memory}")
        return (*found, *changes((now,), (then,)))

    def _good(self) -> Side:
        try:
            self._good_python = self._good_python or self._made(self.good)
        except NotMadeError as error:
            raise CaseFailedError(f"--good {self.good.shown}: {error}") from None
        return Side(self.good.shown, self._spec, self._good_python, f"at {self.good.shown}")

    def _side(self, candidate: Candidate) -> Side:
        return Side(candidate.shown, self._spec, self._made(candidate), f"at {candidate.shown}")

    def _made(self, candidate: Candidate) -> str:
        self._watch(f"{candidate.shown}: its environment")
        return self._history.python(candidate)

    @property
    def _left(self) -> float:
        return self._caller.context.until - time.monotonic()
