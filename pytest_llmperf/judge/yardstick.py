"""Yardstick: in what the two ends of a history differ, and on which side of its middle other launches are. Pure.

What is counted is decided by one pair. Speed is decided in turns, by a sequential test: a candidate is on the side of
the middle that it is shown to be, with a given probability of error over all looks (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal

from pytest_llmperf.judge.exact import changes, count_of
from pytest_llmperf.judge.policy import CONFIRMED_BY, Outlook, Policy, Rule
from pytest_llmperf.judge.stats import Difference, paired_difference, quantile
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, RATE, counts
from pytest_llmperf.records.past_result import Candidate

# Lineage: which candidates may still be the first bad one, and which of them tells most of the others.

#: What is known of a candidate: like the good end, like the bad one, or that nothing can be.
Side = Literal["good", "bad", "skipped"]


class Lineage:
    """The candidates after the good end, each after its parents; the last is the bad end.

    It need not be a line: of a merge each parent's ancestors are its own. A set of candidates is an int, a bit each.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = tuple(candidates)
        self._number = {one.name: index for index, one in enumerate(self.candidates)}
        self._until: list[int] = []
        for index, one in enumerate(self.candidates):
            known = (self._until[self._number[name]] for name in one.parents if name in self._number)
            self._until.append(reduce(or_, known, 1 << index))

    @property
    def bad(self) -> Candidate:
        """The bad end."""
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
        parents = [name for name in first_bad.parents if name in self._number]
        good = [name for name, side in sides.items() if side == "good" and name in self._number]
        for parent in parents:
            if parent in good:
                return parent
            bit = 1 << self._number[parent]
            holders = [name for name in good if self._until[self._number[name]] & bit]
            if holders:
                return holders[0]
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


Pairs = Sequence[tuple[Launch, Launch]]
By = Literal["speed", "memory", "counts", "evidence"]

#: What a bisection may go by.
CRITERIA: tuple[By, ...] = ("speed", "memory", "counts", "evidence")
# A CPU's clock tells less than its counts.
_ON_CPU: tuple[By, ...] = ("counts", "speed", "memory", "evidence")

# Two are the same where the interval of their difference, a logarithm, is within this.
_SAME = 0.003
_MIDDLE = 0.5


@dataclass(frozen=True)
class Yardstick:
    """What tells bad from good: of speed and memory the logarithm of bad over good (step times, bytes) and speed's
    error; of counts the metric, and good's and bad's; of evidence the lines that changed."""

    by: By
    size: float = 0.0
    error: float = 0.0
    metric: str = ""
    ends: tuple[float, float] = (0.0, 0.0)
    lines: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Look:
    """What some pairs say, by themselves or of the ends; ``goes_on``: another pair is worth its cost."""

    goes_on: bool
    side: Side | None = None
    reason: str = ""
    yardstick: Yardstick | None = None
    """Of the ends; neither this nor ``goes_on``: a tie."""


def criteria(by: By | None, *, on_cpu: bool) -> Sequence[By]:
    """What to look at, in this order, where ``by`` is asked for, or anything."""
    return (by,) if by else _ON_CPU if on_cpu else CRITERIA


def compared_ends(pairs: Pairs, policy: Policy, order: Sequence[By], *, alpha: float, budget: int) -> Look:
    """In what good and bad differ by ``pairs`` of (good, bad): the first of ``order`` that tells them apart."""
    for one in order:
        if one == "speed":
            difference = paired_difference(pairs, policy.noise)
            # A user who asks for speed has looked at it; else a CPU's clock tells what is far beyond its noise.
            least = 0.0 if len(order) == 1 or order == CRITERIA else math.log1p(policy.in_pairs().tolerances[RATE])
            if is_shown(difference.log, difference, alpha / 2, budget) and abs(difference.log) > least:
                # Each beyond half of it by itself: one may have met a neighbour.
                half, sign = abs(difference.log) / 2, math.copysign(1.0, difference.log)
                if sum(sign * each > half for each in difference.each) >= min(CONFIRMED_BY, budget):
                    return Look(False, yardstick=Yardstick("speed", difference.log, difference.error))
                if len(pairs) < budget:
                    return Look(True)
            elif _may_show(difference, least, alpha / 2, budget):
                return Look(True)
        elif (found := _exact(one, pairs, policy)) is not None:
            return Look(False, yardstick=found)
    return Look(False)


def side_of(pairs: Pairs, yardstick: Yardstick, policy: Policy, *, alpha: float, budget: int) -> Look:
    """On which side of the middle the second of ``pairs`` is; the first is the good end."""
    before, after = pairs[-1]
    # 0: as the good end, 1: as the bad one.
    if yardstick.by == "memory":
        position = _memory_log(pairs) / yardstick.size
    elif yardstick.by == "counts":
        count, (good, bad) = count_of(after, yardstick.metric), yardstick.ends
        if count is None:
            return Look(False, "skipped", f"its launches do not tell of {yardstick.metric}")
        position = (count - good) / (bad - good)
    elif yardstick.by == "evidence":
        position = len(yardstick.lines & {*changes((after,), (before,))}) / len(yardstick.lines)
    else:
        return side_of_difference(paired_difference(pairs, policy.noise), yardstick, alpha=alpha, budget=budget)
    return Look(False, "bad" if position > _MIDDLE else "good")


def side_of_difference(difference: Difference, yardstick: Yardstick, *, alpha: float, budget: int) -> Look:
    """The same of speed: Wald's test (1945) of "as good" against "as bad", by the change that is sure at least."""
    size = yardstick.size
    beyond = math.copysign(1.0, size) * (difference.log - size / 2)
    # Were the change smaller than it was seen, the two would be nearer to one another than the test takes them for.
    sure = max(0.0, abs(size) - yardstick.error)
    # How well the noise is known widens Student's quantile over the normal one, and this by its square.
    heavier = (quantile(1 - alpha, difference.df) / quantile(1 - alpha, math.inf)) ** 2
    needed = heavier * math.log(1 / alpha)
    reach = needed * difference.error**2 / sure if sure else math.inf
    if abs(beyond) > min(reach, quantile(1 - alpha / budget, difference.df) * difference.error):
        return Look(False, "bad" if beyond > 0 else "good")
    ahead = Outlook.of(difference, Rule(alpha=alpha, budget=budget))
    nearest = needed * ahead.error**2 / sure if sure else math.inf
    if ahead.left and abs(beyond) + ahead.moves > min(
        nearest, quantile(1 - alpha / budget, difference.df) * ahead.error
    ):
        return Look(True)
    num = len(difference.each)
    where = f"{math.expm1(difference.log):+.1%} of step time, too near the middle between good and bad"
    return Look(False, "skipped", f"undecided by {num} pair{'s' * (num > 1)}: {where}")


def is_shown(beyond: float, difference: Difference, alpha: float, budget: int) -> bool:
    """Whether something is ``beyond`` 0 by more than the noise, at one of ``budget`` looks; ``alpha``: one-sided."""
    return abs(beyond) > quantile(1 - alpha / budget, difference.df) * difference.error


def _may_show(difference: Difference, least: float, alpha: float, budget: int) -> bool:
    ahead = Outlook.of(difference, Rule(alpha=alpha, budget=budget))
    reach = quantile(1 - alpha / budget, difference.df) * ahead.error
    is_same = abs(difference.log) + quantile(0.975, difference.df) * difference.error < _SAME
    return ahead.left > 0 and not is_same and abs(difference.log) + ahead.moves > max(reach, least)


def _exact(by: By, pairs: Pairs, policy: Policy) -> Yardstick | None:
    (before, after) = pairs[-1]
    if by == "memory":
        log = _memory_log(pairs)
        return Yardstick(by, log) if abs(log) > math.log1p(policy.in_pairs().tolerances[MEMORY]) else None
    if by == "evidence":
        lines = frozenset(changes((after,), (before,)))
        return Yardstick(by, lines=lines) if lines else None
    for metric in counts():
        then, now = count_of(before, metric), count_of(after, metric)
        if then is not None and now is not None and then != now:
            return Yardstick(by, metric=metric, ends=(then, now))
    return None


def _memory_log(pairs: Pairs) -> float:
    before, after = (min(launch.peak_reserved_bytes for launch in side) for side in zip(*pairs, strict=True))
    return math.log(after / before) if before and after else 0.0
