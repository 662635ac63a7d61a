"""Models of other families train and are watched from their configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.launch import Launch
from tests.worker import launching
from tests.worker.families import ENCODERS, FAMILIES, NO_SDPA

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


def launch(folder: Path, family: str, attention: str) -> tuple[TrainSpec, Launch | Failure]:
    path = folder / family
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": family, **{**FAMILIES, **ENCODERS}[family]}))
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
    return spec, launching.launch(spec, folder / "run")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_and_what_was_asked_for_was_active(tmp_path: Path, family: str) -> None:
    spec, ran = launch(tmp_path, family, "eager" if family in NO_SDPA else "sdpa")
    assert isinstance(ran, Launch), ran
    assert troubles(spec, ran) == ()
    assert ran.tokens_per_step == 120
    assert spec.id.startswith(family.replace("_", "-"))


@pytest.mark.parametrize(
    ("family", "said"),
    [("gpt_oss", "gpt_oss has no attention='sdpa' in "), ("bert", "bert with is_decoder=False is no causal model, ")],
)
def test_what_is_refused_is_one_line_and_no_error_of_a_rank(tmp_path: Path, family: str, said: str) -> None:
    _, ran = launch(tmp_path, family, "sdpa")
    assert isinstance(ran, Failure)
    assert ran.kind == "refused"
    assert ran.message.startswith(said)
    assert "\n" not in ran.message
    assert ran.tail == ()
