"""Lineage: which candidates may still be the first bad one, and which of them tells most of the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pytest_llmperf.records.candidate import Candidate

#: What is known of a candidate: like the good end, like the bad one, or that nothing can be.
Side = Literal["good", "bad", "skipped"]


class Lineage:
    """The candidates after the good end, each after its parents; the last is the bad end.

    It need not be a line: of a merge each parent's ancestors are its own. A set of candidates is an int, a bit each.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = tuple(candidates)
        number = {one.name: index for index, one in enumerate(self.candidates)}
        self._number = number
        self._until: list[int] = []
        for index, one in enumerate(self.candidates):
            known = (number[name] for name in one.parents if name in number)
            self._until.append(_union(self._until[parent] for parent in known) | 1 << index)

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
        open_ones = [
            index
            for index in _indices(suspected)
            if index != self._newest_bad(sides) and self._name(index) not in sides
        ]
        halves = {index: self._suspected_until(index, suspected) for index in open_ones}
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

    def _newest_bad(self, sides: Mapping[str, Side]) -> int:
        bad = [self._number[name] for name, side in sides.items() if side == "bad" and name in self._number]
        return min(bad, key=lambda index: self._until[index].bit_count(), default=len(self.candidates) - 1)

    def _suspected_until(self, index: int, suspected: int) -> int:
        return (self._until[index] & suspected).bit_count()

    def _name(self, index: int) -> str:
        return self.candidates[index].name


def most_steps(num_suspects: int) -> int:
    """Comparisons that a line of so many suspects needs: half of them remain after each."""
    return max(0, num_suspects - 1).bit_length()


def _union(sets: Iterable[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


def _indices(members: int) -> list[int]:
    return [index for index in range(members.bit_length()) if members >> index & 1]
