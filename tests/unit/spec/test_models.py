"""Models: where a configuration comes from, and what is told of a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.settings import models


def test_llama_flops_per_token_are_six_times_its_parameters_and_the_attention() -> None:
    geometry = models.resolve("llama-3.2-1b").geometry
    assert geometry is not None
    norms = 33 * 2048  # vectors, which take part in no matrix product
    expected = 6 * (1_235_814_400 - norms) + 12 * 16 * 2048 * 1024
    assert geometry.flops_per_token(1024) == expected
    assert geometry.flops_per_token(1024) == pytest.approx(7.82e9, rel=1e-3)


def test_a_plain_feed_forward_block_has_two_matrices() -> None:
    geometry = models.resolve("opt-1.3b").geometry
    assert geometry is not None
    assert geometry.num_feed_forward_matrices == 2
    # 24 layers of 12 h² weights and the vocabulary, six operations each, and the attention scores.
    expected = 6 * (24 * 12 * 2048**2 + 50272 * 2048) + 12 * 24 * 2048 * 1024
    assert geometry.flops_per_token(1024) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", 'no "model_type"'),
        ("{}", 'no "model_type"'),
        ("\udcff", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5_000, "not JSON"),
    ],
)
def test_a_broken_configuration_is_one_line_that_names_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=r".") as refusal:
        models.resolve(str(path))
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    if text.isascii():
        assert said in str(refusal.value)


def test_a_folder_without_a_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        models.resolve(str(tmp_path))


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        models.resolve(str(tmp_path / "config.json"))


def test_configurations_of_one_folder_name_keep_their_ids_apart(tmp_path: Path) -> None:
    slugs = set()
    for layers in (2, 3):
        folder = tmp_path / str(layers) / "My Model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(f'{{"model_type": "llama", "num_hidden_layers": {layers}}}')
        slugs.add(models.resolve(str(folder)).slug)
    assert len(slugs) == 2
    assert all(slug.startswith("my-model-") for slug in slugs)


def test_an_unknown_family_has_no_geometry(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1}')
    assert models.resolve(str(tmp_path)).geometry is None


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": "64"}, "hidden_size='64' must be a whole number of at least 1"),
        ({"hidden_size": 64.0}, "hidden_size=64.0 must be a whole number"),
        ({"hidden_size": True}, "hidden_size=True must be a whole number"),
        ({"hidden_size": -64}, "hidden_size=-64 must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number"),
        ({"num_attention_heads": 5}, "5 attention heads do not divide a hidden size of 64"),
        ({"num_key_value_heads": 3}, "3 key-value heads do not divide 4 attention heads"),
    ],
)
def test_a_geometry_that_cannot_be_is_one_line(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | values))
    with pytest.raises(ValueError, match=r".") as refusal:
        models.resolve(str(path))
    assert str(refusal.value).startswith(f"model config {path}: {said}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("values", [{"num_attention_heads": 5, "head_dim": 16}, {"num_key_value_heads": None}])
def test_a_geometry_that_can_be_is_taken(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | values))
    assert models.resolve(str(tmp_path)).geometry is not None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("~nosuchuser/x", "cannot be looked up"),
        ("x" * 300, "File name too long|unknown model"),  # since Python 3.13 such a path is merely no folder
        ("a\0b", "unknown model"),
    ],
)
def test_a_name_that_no_path_can_have_is_one_line(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refusal:
        models.resolve(name)
    assert repr(name) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_one_relative_path_in_two_working_folders_is_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for layers in (2, 3):
        folder = tmp_path / str(layers)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
        monkeypatch.chdir(folder)
        found.append(models.resolve("config.json").config["num_hidden_layers"])
    assert found == [2, 3]


def test_a_file_that_was_changed_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for vocabulary in (512, 1024):
        path.write_text(json.dumps(LLAMA | {"vocab_size": vocabulary}))
        assert models.resolve(str(path)).config["vocab_size"] == vocabulary
