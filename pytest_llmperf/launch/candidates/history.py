"""History: candidates from a good end to a bad one, and an interpreter for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pytest_llmperf.records.candidate import Candidate


@dataclass(frozen=True)
class Span:
    """What lies between two ends."""

    good: Candidate
    candidates: tuple[Candidate, ...]
    """After the good end, each after its parents; the last is the bad end."""
    notes: tuple[str, ...] = ()
    """What a reader should know of them."""


class History(Protocol):
    """Where candidates come from."""

    @property
    def key(self) -> tuple[str, ...]:
        """What makes its interpreters other than those of the same names elsewhere."""

    def span(self, good: str, bad: str) -> Span:
        """What is between the ends that were named.

        Raises:
            HistoryError: they are none, or not in this order.
        """

    def python(self, candidate: Candidate) -> str:
        """An interpreter that has it.

        Raises:
            NotMadeError: there is none.
        """

    def further(self, candidate: Candidate) -> str:
        """A command that shows what is in it."""
