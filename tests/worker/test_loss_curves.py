"""A loss curve of real trainings: recorded, found the same by one launch, and told apart at another learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch import local
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.findings import Concluded
from tests.worker.engine import checks
from tests.worker.import_patch import in_the_rank

pytest.importorskip("torch")
pytest.importorskip("datasets")

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(240)]

SPEC = TrainSpec(
    model="llama-tiny",
    model_precision="fp32",
    mixed_precision="no",
    data="text",
    sequence_length=32,
    micro_batch_size=2,
    steps=24,
    min_steps=24,
)

NO_CHANGE = "pass"

# As the schedule says, so that only what is learnt tells of it.
OTHER_RATE = """
    prepare = module.TrainingArguments.__post_init__
    def other(self):
        self.learning_rate *= 10
        prepare(self)
    module.TrainingArguments.__post_init__ = other"""


class Patched(LocalLauncher):
    """Launches of which each rank has ``patch``."""

    patch = NO_CHANGE

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        variables = in_the_rank(request.folder.parent, "transformers.training_args", self.patch)
        return super().launch(replace(request, variables=variables), watch)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("curves")


def checked(home: Path, monkeypatch: pytest.MonkeyPatch, patch: str = NO_CHANGE, **settings: Any) -> Concluded:
    monkeypatch.setattr(local, "LocalLauncher", Patched)
    monkeypatch.setattr(Patched, "patch", patch)
    # As many seeds as it takes; of the case itself one launch.
    run = checks(home, loss_curve=True, trace=False, max_launches=1, **settings)
    return run.check(SPEC)


def test_a_training_is_the_same_as_before_and_told_apart_from_others(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = checked(home, monkeypatch, update="all", reason="start")
    assert "recorded loss curve of 5 seeds, 42 to 46, of 24 steps" in recorded.result.updated

    again = checked(home, monkeypatch).result
    assert again.loss_curve is not None
    assert (again.loss_curve.verdict, again.loss_curve.seeds) == ("same", (42,))
    assert again.loss_curve.reason.startswith("the same to the last digit")

    other = checked(home, monkeypatch, OTHER_RATE)
    assert (other.result.verdict, other.fails) == ("invalid", True)
    assert other.result.reason.startswith("loss curve faster: loss of steps ")
    assert "(2 of 5 seeds)" in other.result.reason
