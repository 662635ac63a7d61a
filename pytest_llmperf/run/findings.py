"""Findings: what one test found, and how it reaches the process that tells of it; who sees launches meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pytest_llmperf.records.result import CaseResult, Spent
from pytest_llmperf.records.results_document import Planned, Skipped
from pytest_llmperf.support import codec

if TYPE_CHECKING:
    from pytest_llmperf.records.failure import Progress
    from pytest_llmperf.records.launch import Launch


@codec.sparse("held_against", "refused")
@dataclass(frozen=True, kw_only=True)
class Concluded:
    """One case, concluded or planned."""

    result: CaseResult
    held_against: str = "none"
    """For people: how much of a baseline, or what took turns with it."""
    refused: str = ""
    """Why it was not recorded, where the run asked for that."""
    fails: bool = False
    """Whether the case does not hold, and was not recorded either; told anew by each run, so that no file has it."""
    is_acceptable: bool = True
    """Whether its figures are of the kind that baselines keep."""


@dataclass
class Findings:
    """The findings of one test; they travel on its report."""

    results: list[CaseResult] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Those of every spec it asked about, also where it was skipped: their baselines are in use."""
    named: bool = False
    """Whether it ever asked about one."""
    begun: bool = False
    """Whether one of them was looked at: what a run of one width has first decides where the test belongs."""
    withheld: str = ""
    """Why nothing was launched for what it asked about, where it went on without."""
    stopped: bool = False
    """Whether it was ended at a spec that cannot run here."""
    cut: bool = False
    """Whether it ended by itself before its end: nobody knows what else it would have asked about."""
    spent: Spent = field(default_factory=Spent)
    """By its launches."""

    def take(self, said: str = "") -> dict[str, Any] | None:
        """Return what was found since the last time, to be sent away; ``None`` where nothing was."""
        if not (self.results or self.planned or self.skipped or self.digests or said or self.spent.phases):
            return None
        values = {
            "results": [codec.plain(result) for result in self.results],
            "planned": [vars(planned) for planned in self.planned],
            "skipped": [vars(skipped) for skipped in self.skipped],
            "digests": self.digests,
            "said": said,
            "spent": vars(self.spent),
        }
        self.results, self.planned, self.skipped, self.digests, self.spent = [], [], [], [], Spent()
        return values

    def add(self, values: Mapping[str, Any]) -> None:
        """Take in what another process sent."""
        self.results += [codec.read(CaseResult, result) for result in values["results"]]
        self.planned += [Planned(**planned) for planned in values["planned"]]
        self.skipped += [Skipped(**skipped) for skipped in values["skipped"]]
        self.digests += values["digests"]
        self.spent += Spent(**values["spent"])


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
