"""The results of this run so far, for tests that ask for the same and for wider cases of the same training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.gain import Narrow
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.parity import ParityOrder, TrainingErrors
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.settings.spec import Spec, is_narrower


@dataclass(frozen=True)
class Measured:
    """One case that this run has judged, or planned."""

    spec: Spec
    result: CaseResult
    baseline: Baseline | None
    """What it was held against."""
    refused: str = ""
    """Why it was not recorded, where the run asked for that."""
    again: bool = False
    """Whether the test is run again: these launches are told of by nobody else."""

    @property
    def nodeid(self) -> str:
        """The test that launched it."""
        return self.result.shares or self.result.nodeid

    def lent(self, result: CaseResult) -> tuple[CaseResult, str]:
        """``result``, of a test that has these launches too; as recorded, if they were, and why not, if refused."""
        # What one test was allowed to record excuses no other verdict: that test has markers of its own.
        updated = self.result.updated if result.verdict == self.result.verdict else ""
        if self.again and result.nodeid == self.nodeid:
            return replace(result, updated=updated), self.refused
        shared, all_of_them = len(self.result.launches), len(result.launches)
        alone = shared == all_of_them
        whose = "its launches are those of" if alone else f"{shared} of its {all_of_them} launches made by"
        result = replace(
            result,
            updated=updated,
            notes=(*result.notes, f"{whose} {self.nodeid}"),
            shares=self.nodeid if alone else "",
            shared_launches=shared,
        )
        return result, self.refused


@dataclass(frozen=True)
class MadeTrainings:
    """Those of one launch: what was seen of each, and the folder where the plain form's true gradients lie too."""

    folder: str
    errors: tuple[TrainingErrors, ...]


class ResultCache:
    """The cases that this process has judged, in their order."""

    def __init__(self) -> None:
        self._measured: list[Measured] = []
        # What a small training of one case did serves every other case that asks for the same.
        self.true_trainings: dict[tuple[str, ParityOrder], MadeTrainings] = {}
        self.training_errors: dict[tuple[str, str], tuple[TrainingErrors, ...]] = {}

    def add(self, measured: Measured) -> None:
        """Keep it, but for what cannot be trusted."""
        if measured.result.verdict != "invalid":
            self._measured.append(measured)

    @property
    def launches(self) -> list[Launch]:
        """The launches of all that were judged, each once."""
        return list({id(launch): launch for one in self._measured for launch in one.result.launches}.values())

    def begin_again(self, nodeid: str) -> None:
        """The test is run once more: what it has measured is pooled with what it will, and is its own."""
        self._measured = [replace(one, again=one.again or one.nodeid == nodeid) for one in self._measured]

    def same(self, spec: Spec) -> Measured | None:
        """The latest that was launched, or planned, of ``spec``."""
        return next((one for one in reversed(self._measured) if one.spec == spec), None)

    def narrow(self, wide: Spec, scaled_from: Spec | None) -> Narrow | None:
        """The narrowest of the series of ``wide``, or ``scaled_from``, as this run measured it."""

        def serves(spec: Spec) -> bool:
            return spec.digest == scaled_from.digest if scaled_from else is_narrower(spec, wide)

        found = [one for one in reversed(self._measured) if one.result.launches and serves(one.spec)]
        best = min(found, key=lambda one: one.spec.gpus, default=None)
        if best is None:
            return None
        return Narrow(gpus=best.spec.gpus, launches=best.result.launches, baseline=best.baseline, in_this_run=True)
