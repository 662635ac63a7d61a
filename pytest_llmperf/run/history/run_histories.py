"""The histories of the cases of some runs, for their page: what a store holds, and the runs themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pytest_llmperf.judge.case_histories import CaseHistory, histories
from pytest_llmperf.report.run_document import RunDocument
from pytest_llmperf.report.text import one_line
from pytest_llmperf.run.history.history import History, of_project
from pytest_llmperf.run.history.machine_noise import scattering
from pytest_llmperf.run.history.past_results import past_results


@dataclass(frozen=True)
class RunHistories:
    """Of cases that were measured by two runs at least."""

    cases: tuple[CaseHistory, ...] = ()
    troubles: tuple[str, ...] = ()
    """A line for each source that cannot serve."""

    @classmethod
    def read(cls, runs: Sequence[RunDocument], store: Path | None, baselines: Path) -> RunHistories:
        """Of the cases of ``runs``, from ``store``; whatever goes wrong is a line, as a page can do without."""
        try:
            own = list(chain.from_iterable(past_results(run, f"{i} {run.source}") for i, run in enumerate(runs)))
            asked = {(result.machine, result.digest) for result in own}
            machines = {machine for machine, _ in asked}
            stored = History.read([store] if store is not None and store.exists() else [])
            results = [result for result in stored.results if result.machine in machines]
            project = next((result.project for result in own if result.project), "")
            both = of_project(History.of([*results, *own]).results, project)
            found = histories(both, scattering(machines, baselines), asked)
            return cls(tuple(one for one in found if len(one.results) > 1), stored.troubles)
        except Exception as error:  # noqa: BLE001 - a page without its history is a page
            return cls((), (one_line(f"its history is not shown: {type(error).__name__}: {error}"),))
