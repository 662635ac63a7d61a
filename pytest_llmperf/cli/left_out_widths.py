"""Widths that a night is not for: its suite may have tests for more GPUs than the site has."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from pytest_llmperf.support import quantities

#: More GPUs than the widest of the night.
WIDER = "wider"


@dataclass(frozen=True)
class LeftOut:
    """As somebody decided, so that no test of these is missed."""

    widths: AbstractSet[int] = frozenset()
    wider: bool = False

    def has(self, width: int, night: AbstractSet[int]) -> bool:
        """Whether a test of ``width`` is left out of a night of these widths."""
        return width in self.widths or (self.wider and width > max(night, default=0))


def left_out(words: Sequence[str]) -> LeftOut | None:
    """What ``words`` leave out; ``None`` where one of them is no width."""
    numbers = [quantities.count(word) for word in words if word != WIDER]
    widths = frozenset(number for number in numbers if number is not None)
    return LeftOut(widths, WIDER in words) if None not in numbers else None
