"""Models of other families train and are watched from their configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.course import Failure
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.launch.local import LaunchRequest, LocalLauncher
from pytest_llmperf.measurement import Launch
from tests.worker.families import FAMILIES

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

# Its scores are capped between the two products, which PyTorch's fused attention cannot.
NO_SDPA = frozenset({"gemma2"})


def launch(folder: Path, family: str, attention: str) -> tuple[TrainSpec, Launch | Failure]:
    path = folder / family
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": family, **FAMILIES[family]}))
    spec = TrainSpec(
        model=str(path),
        attention=attention,
        gradient_checkpointing=attention == "eager",
        micro_batch_size=2,
        sequence_length=60,  # no multiple of 8 either
        steps=6,
        min_steps=6,
        warmup_steps=2,
    )
    request = LaunchRequest(spec=spec, folder=folder / "run", gpus=(), timeout_seconds=200)
    return spec, LocalLauncher().launch(request, lambda _: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_and_what_was_asked_for_was_active(tmp_path: Path, family: str) -> None:
    spec, ran = launch(tmp_path, family, "eager" if family in NO_SDPA else "sdpa")
    assert isinstance(ran, Launch), ran
    assert troubles(spec, ran) == ()
    assert ran.tokens_per_step == 120
    assert spec.id.startswith(family.replace("_", "-"))


def test_what_a_family_cannot_do_is_its_own_words_in_one_line(tmp_path: Path) -> None:
    _, ran = launch(tmp_path, "gemma2", "sdpa")
    assert isinstance(ran, Failure)
    assert "Gemma2ForCausalLM does not support" in ran.message
    assert "\n" not in ran.message
