"""Models: where a configuration comes from, and what is told of a broken one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmperf import models


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
    [("{", "not JSON"), ("[]", 'no "model_type"'), ("{}", 'no "model_type"'), ("\udcff", "not JSON")],
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
