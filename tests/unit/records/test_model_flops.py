"""FLOPs of a token: by formula where it is right, else by a count that is kept on this disk."""

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
def counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    found: list[str] = []

    class Counts:
        def ask(self, model: models.Model, _sequence_length: int) -> int:
            found.append(model.slug)
            return 0

        def answer(self, _number: int) -> float:
            return 1e6

        def close(self) -> None: ...

    monkeypatch.setattr(derived_metrics, "FlopCounts", Counts)
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "cache"))
    return found


def kept(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "flops").iterdir()
    return path


BROKEN = [
    "",
    "{",
    "[]",
    "7",
    '{"flops": 1}',
    '{"flops_per_token": "many"}',
    '{"flops_per_token": NaN}',
    '{"flops_per_token": -1}',
    '{"flops_per_token": true}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_counted_anew_and_replaced(tmp_path: Path, counts: list[str], text: str) -> None:
    assert ModelFlops().per_token(SPEC) == 1e6
    kept(tmp_path).write_text(text)
    for _ in range(2):
        assert ModelFlops().per_token(SPEC) == 1e6
    assert len(counts) == 2


def test_a_file_that_is_no_text_is_counted_anew(tmp_path: Path, counts: list[str]) -> None:
    ModelFlops().per_token(SPEC)
    kept(tmp_path).write_bytes(b"\xff\xfe\x00")
    assert ModelFlops().per_token(SPEC) == 1e6
    assert len(counts) == 2


@pytest.mark.parametrize("changed", ["torch", "transformers", "counter"])
def test_other_versions_are_another_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counts: list[str], changed: str
) -> None:
    by = {"torch": "2.13", "transformers": "5.23", "counter": "abc"}
    for versions in (by, by, by | {changed: "other"}):
        monkeypatch.setattr(derived_metrics, "_counted_by", lambda versions=versions: versions)
        ModelFlops().per_token(SPEC)
    assert len(counts) == 2
    assert len([*(tmp_path / "cache" / "flops").iterdir()]) == 2


def test_a_home_that_cannot_be_written_costs_a_count_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counts: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        assert ModelFlops().per_token(SPEC) == 1e6
    assert len(counts) == 2


def test_it_is_kept_where_the_user_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counts: list[str]
) -> None:
    monkeypatch.delenv("LLMPERF_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    ModelFlops().per_token(SPEC)
    (path,) = (tmp_path / "xdg" / "pytest-llmperf" / "flops").iterdir()
    assert json.loads(path.read_text())["flops_per_token"] == 1e6
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
