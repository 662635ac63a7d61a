"""Timeouts: which choices of what ran out of its time may be to blame, and so how likely others run out of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

_Traits = Mapping[str, Any]


class Timeouts:
    """Of one search.

    To blame may be each choice that nothing has had that came to its end, all alike: a compiler that is new to this
    host, or a kernel that hangs. Before anything came to its end the host itself may be to blame, and no choice is.
    """

    def __init__(self, size: str) -> None:
        """``size`` is the trait that is a number, and no choice of those: what steps of it take is known."""
        self._size = size
        self._in_time: set[tuple[str, str]] = set()
        self._late: dict[int, tuple[_Traits, float]] = {}
        self.blamed: Mapping[int, _Traits] = {}
        """Of each that ran out of its time, by its number, the choices that may be to blame, where there are any."""

    def in_time(self, traits: _Traits) -> None:
        """One with these traits came to its end."""
        self._in_time.update((name, str(value)) for name, value in traits.items())
        self._blame()

    def ran_out(self, number: int, traits: _Traits, seconds: float) -> None:
        """One with these traits was ended after so many."""
        if self._in_time:
            self._late[number] = traits, seconds
            self._blame()

    @property
    def seconds(self) -> float:
        """What one more is expected to take; 0 before the first."""
        return fmean(seconds for _, seconds in self._late.values()) if self._late else 0.0

    def risk(self, traits: _Traits) -> float:
        """That one with these traits runs out of its time too: the share of what may be to blame that it has."""
        return max((self._share(blamed, traits) for blamed in self.blamed.values()), default=0.0)

    def like(self, traits: _Traits) -> Sequence[int]:
        """Those of which it has all that may be to blame."""
        return [number for number, blamed in self.blamed.items() if self._share(blamed, traits) == 1.0]

    def _share(self, blamed: _Traits, traits: _Traits) -> float:
        shared = [name for name, value in blamed.items() if traits[name] == value]
        return len(shared) / len(blamed)

    def _blame(self) -> None:
        found = {number: self._not_in_time(traits) for number, (traits, _) in self._late.items()}
        self.blamed = {number: traits for number, traits in found.items() if traits}

    def _not_in_time(self, traits: _Traits) -> _Traits:
        return {
            name: value
            for name, value in traits.items()
            if name != self._size and (name, str(value)) not in self._in_time
        }
