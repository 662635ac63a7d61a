"""The width of a run: the number of GPUs whose tests it is for, where a night runs each width by itself.

What a test asks for is known when it has asked: a dry run of all tests tells it beforehand, and a test of which that
tells nothing is held to the first spec that it asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_llmperf.records.results_document import Elsewhere
from pytest_llmperf.settings.train_spec import TrainSpec


@dataclass(frozen=True, kw_only=True)
class Width:
    """The number of GPUs, or of ranks on the CPU, whose tests are to run."""

    gpus: int
    plan: Mapping[str, int] | None = None
    """By node id, the widest spec that a test asks for; ``None``: nobody has asked them."""
    is_whole: bool = True
    """Whether every test was asked."""

    def selects(self, nodeid: str, *, is_case: bool) -> bool:
        """Whether a test may be of this width; one that asked for nothing, and has no ``perf``, is of none."""
        if self.plan is not None and nodeid in self.plan:
            return self.plan[nodeid] == self.gpus
        return is_case or self.plan is None or not self.is_whole

    def knows(self, nodeid: str) -> bool:
        """Whether the plan tells what the test asks for."""
        return self.plan is not None and nodeid in self.plan


@dataclass
class WidthCheck:
    """One test of a run of one width, while it asks."""

    width: Width | None
    nodeid: str
    begun: bool = field(default=False, init=False)
    """Whether it has asked for anything yet."""

    def elsewhere(self, specs: Sequence[TrainSpec], most: int) -> tuple[Elsewhere, str]:
        """What is not of this width where specs that belong together are, and why; empty where they are.

        At ``most`` so many GPUs, or ranks on the CPU, are here: a night's job may hold fewer than its width.
        """
        if self.width is None:
            return "", ""
        asked, gpus = max(spec.gpus for spec in specs), self.width.gpus
        first = not self.begun and not self.width.knows(self.nodeid)
        self.begun = True
        if first and asked != gpus:
            return "test", f"asks for {asked} GPU(s), and this run is for tests of {gpus} (--perf-width)"
        if asked > gpus:
            why = f"asked for {asked} GPUs after {gpus}, at whose width the test runs: ask for the widest first"
            return "case", why
        if asked > most:
            return "case", f"asks for {asked} GPUs or ranks, and its job has {most}"
        return "", ""
