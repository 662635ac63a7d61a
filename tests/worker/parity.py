"""Small trainings launched for real on the CPU, each beside the truth of one plain form, and faults put into them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.trainings import Parity, judge_parity
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest, WarmStart
from pytest_llmperf.records.learning import ParityOrder, TrainingErrors
from pytest_llmperf.settings.registry import plainest, small
from tests.worker import launching
from tests.worker.import_patch import as_on_gpus, in_the_rank

LLAMA = "transformers.models.llama.modeling_llama"
NO_CHANGE = ("math", "pass")

AS_ON_GPUS = as_on_gpus("pytest_llmperf.worker.recipes.huggingface.small_trainer")


def launched(spec: TrainSpec, order: ParityOrder, folder: Path, module: str, patch: str) -> list[TrainingErrors]:
    """What the small trainings of a launch did, with ``patch`` run over ``module`` in each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    request = LaunchRequest(
        spec=spec,
        folder=folder / "run",
        gpus=(),
        timeout_seconds=240.0,
        trace=False,
        parity=order,
        variables=in_the_rank(folder, module, patch),
        warm=WarmStart(launching.shared_pool()[0], _refuse, is_required=True),
    )
    errors = LocalLauncher().training_errors(request, lambda _: None)
    assert isinstance(errors, list), errors
    return errors


class Plain:
    """The truth of one plain form, and what rounding does to it."""

    def __init__(self, spec: TrainSpec, folder: Path, gathered: str = "no", patch: tuple[str, str] = NO_CHANGE) -> None:
        self.folder = folder
        self.errors = launched(plainest(spec), ParityOrder(gathered=gathered), folder, *patch)

    def beside(self, spec: TrainSpec, folder: Path, patch: tuple[str, str] = NO_CHANGE) -> Parity:
        """How ``spec``, made small, does beside it."""
        return judge_parity(self.trained(spec, folder, patch), self.errors)

    def trained(self, spec: TrainSpec, folder: Path, patch: tuple[str, str] = NO_CHANGE) -> list[TrainingErrors]:
        """What ``spec``, made small, did."""
        return launched(small(spec), ParityOrder(truth=str(self.folder / "run")), folder, *patch)


def figures(parity: Parity) -> Mapping[str, float]:
    """By metric, the share of its limit that is used."""
    return {check.metric: check.value / (check.limit or 1.0) for check in parity.checks}


def _refuse(line: str) -> Any:
    raise AssertionError(line)
