"""What a run tells while it lasts, and to whom: a terminal, a log, nobody."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch


class LaunchObserver(Protocol):
    """Sees one launch."""

    def update(self, progress: Progress) -> None:
        """It has come so far."""

    def finished(self, launch: Launch) -> None:
        """It has left its record."""

    def clear(self) -> None:
        """Nothing more is shown of it."""


class Observer(Protocol):
    """Sees the launches of one case."""

    def say(self, line: str) -> None:
        """A line about what happens, or about why nothing seems to."""

    def launch(self, spec_id: str, number: int, launches: int) -> AbstractContextManager[LaunchObserver]:
        """One launch begins."""

    def ended_from_outside(self, error: BaseException) -> str:
        """Why somebody else ended what was waited for, a test's time limit say; empty of an error of our own."""
