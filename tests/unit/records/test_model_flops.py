"""FLOPs of a token: by formula where it is right, else by a count."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.launch import prediction
from pytest_llmperf.launch.prediction import CountError, FlopCounts
from pytest_llmperf.run import derived_metrics
from pytest_llmperf.run.derived_metrics import ModelFlops
from pytest_llmperf.settings import models
from pytest_llmperf.settings.train_spec import TrainSpec

SPEC = TrainSpec(model="mixtral-tiny", sequence_length=64)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    class Counts:
        def ask(self, model: models.Model, _sequence_length: int) -> int:
            found.append(model.slug)
            return 0

        def answer(self, _number: int) -> float:
            return 1e6

        def close(self) -> None: ...

    monkeypatch.setattr(derived_metrics, "FlopCounts", Counts)
    return found


def test_a_run_counts_a_configuration_once(counts: list[str]) -> None:
    flops = ModelFlops()
    assert [flops.per_token(SPEC), flops.per_token(SPEC)] == [1e6, 1e6]
    assert counts == ["mixtral-tiny"]


def configured(tmp_path: Path, **config: Any) -> models.Model:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **config}))
    return models.resolve(str(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mixtral"},
        {"model_type": "llama"},  # whose feed-forward block is then another one's
        {"model_type": "mistral", "intermediate_size": 128},
        {"model_type": "qwen3", "intermediate_size": 128, "num_key_value_heads": 2},
        {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 32},
    ],
)
def test_what_a_configuration_leaves_to_its_family_is_counted(tmp_path: Path, config: dict[str, Any]) -> None:
    assert configured(tmp_path, **config).flops_per_token(64) is None


def test_what_it_says_is_computed(tmp_path: Path) -> None:
    model = configured(tmp_path, model_type="opt", ffn_dim=128, word_embed_proj_dim=64)
    assert model.geometry is not None
    assert model.flops_per_token(64) == model.geometry.flops_per_token(64)


def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> float:
    """The answer of an interpreter that does what ``script`` says."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    counts = FlopCounts()
    try:
        return counts.answer(counts.ask(models.resolve("mixtral-tiny"), 64))
    finally:
        counts.close()


@pytest.mark.skipif(os.name != "posix", reason="runs a shell")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("""echo '{"number": 0, "error": "RefusedError: no such type"}'""", "RefusedError: no such type"),
        ("echo 'ModuleNotFoundError: No module named torch' >&2; exit 1", "No module named torch"),
        ("exit 3", "it ended with exit code 3 and said nothing"),
        ("kill -9 $$", "it ended with exit code -9 and said nothing"),
        ("echo 12; echo null", "it ended with exit code 0 and said nothing"),
        ("exec sleep 60", "no answer after 0.3 s"),
    ],
)
def test_a_count_that_fails_says_why_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    monkeypatch.setattr(prediction, "_SECONDS", 0.3 if "sleep" in script else 60)
    with pytest.raises(CountError) as caught:
        asked(monkeypatch, tmp_path, script)
    assert str(caught.value) == said


@pytest.mark.skipif(os.name != "posix", reason="runs a shell")
def test_the_answer_is_found_among_what_libraries_print(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = """read -r asked; echo loading; echo '{"number": 0, "flops_per_token": 12.5}'; echo done"""
    assert asked(monkeypatch, tmp_path, script) == 12.5


@pytest.mark.skipif(os.name != "posix", reason="runs a shell")
def test_it_leaves_cores_to_those_that_train_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = min(19, os.nice(0) + 10)
    # It is set once the process has begun.
    script = f"""for _ in $(seq 600); do [ "$(ps -o ni= -p $$ | tr -d ' ')" = {own} ] && break; sleep 0.05; done
[ "$(ps -o ni= -p $$ | tr -d ' ')" = {own} ] || exit 1
echo '{{"number": 0, "flops_per_token": 12.5}}'"""
    assert asked(monkeypatch, tmp_path, script) == 12.5
