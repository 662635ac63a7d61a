"""A first figure on a kind of GPU without baselines is told beside what another kind's say of it; nothing is held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.engine.conftest import Engine
from tests.golden import REPOSITORY

H100 = Machine(gpus=(Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 * 2**30),), cpu_name="Fake CPU", cores=8)
CASE = TrainSpec(model="llama-3.2-1b", micro_batch_size=14, steps=20)


@pytest.fixture(autouse=True)
def h200(engine: Engine) -> None:
    engine.on(H100)
    (engine.path / "baselines").mkdir()
    (engine.path / "baselines" / "nvidia-h200-140gib").symlink_to(REPOSITORY / "baselines" / "nvidia-h200-140gib")


@pytest.mark.parametrize(
    ("step_seconds", "told"),
    [(0.3143, "plausible: 45.6k "), (0.6, "at 5"), (0.1, "at 3")],
    ids=["as it was", "slow", "impossible"],
)
def test_a_first_figure_is_told_beside_its_expectation(engine: Engine, step_seconds: float, told: str) -> None:
    engine.fake(step_seconds=step_seconds)
    found = engine.check(CASE, gpus=1)
    (note,) = [note for note in found.result.notes if "expected" in note]
    assert note.startswith(told)
    assert f"{CASE.id} on nvidia-h200-140gib" in note
    assert (found.result.verdict, found.fails) == ("new", True)


def test_it_holds_nothing_and_is_not_told_of_a_case_with_a_baseline(engine: Engine) -> None:
    engine.fake(step_seconds=0.6)
    assert engine.check(CASE, gpus=1, update="all", reason="start").result.updated
    assert engine.check(CASE, gpus=1).result.verdict == "pass"
    assert not [note for note in engine.check(CASE, gpus=1).result.notes if "expected" in note]


def test_of_a_model_that_no_case_is_of_the_size_of_nothing_is_told(engine: Engine) -> None:
    engine.fake(step_seconds=0.1)
    result = engine.check(replace(CASE, model="llama-tiny", sequence_length=64), gpus=1).result
    assert not [note for note in result.notes if "expected" in note]
