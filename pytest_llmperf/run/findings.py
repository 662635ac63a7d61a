"""Findings: what one test found, and how it reaches the process that tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_llmperf.records.result import CaseResult, Spent
from pytest_llmperf.records.results_document import Planned, Skipped
from pytest_llmperf.support import codec


@dataclass
class Findings:
    """What one test found; travels on its report."""

    results: list[CaseResult] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Of every spec it asked about, also where it was skipped: their baselines are in use."""
    named: bool = False
    """Whether it ever asked about one."""
    withheld: str = ""
    """Why nothing was launched for what it asked about, where it went on without."""
    stopped: bool = False
    """Whether it was ended at a spec that cannot run here."""
    cut: bool = False
    """Whether it ended by itself before its end: nobody knows what else it would have asked about."""
    spent: Spent = field(default_factory=Spent)
    """By its launches."""

    def take(self, said: str = "") -> dict[str, Any] | None:
        """What was found since the last time, to be sent away; ``None`` where nothing was."""
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
