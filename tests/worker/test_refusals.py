"""What transformers cannot train as it was asked for is refused in one line that says what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.settings.models import Model
from pytest_llmperf.settings.setting import SpecError

torch = pytest.importorskip("torch")

from transformers.pytorch_utils import Conv1D  # noqa: E402 - they need torch

from pytest_llmperf.records.ranks import RefusedError  # noqa: E402
from pytest_llmperf.worker import build  # noqa: E402
from pytest_llmperf.worker.build import build_model, check_direction  # noqa: E402
from pytest_llmperf.worker.estimate.memory_estimator import plan  # noqa: E402
from tests.golden import Golden  # noqa: E402
from tests.worker.families import ENCODERS, FAMILIES, NO_SDPA  # noqa: E402

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

SPEC = TrainSpec(model="llama-tiny", sequence_length=64)


def of(family: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": family, **{**FAMILIES, **ENCODERS}.get(family, {}), **settings}


def built(config: Mapping[str, Any], attention: str = "eager") -> Any:
    return build_model(TrainSpec(**{**SPEC.to_dict(), "attention": attention}), config, torch.device("cpu"))


def refusal_of(config: Mapping[str, Any], attention: str) -> str:
    with pytest.raises(RefusedError) as refused:
        built(config, attention)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("gpt_oss", "sdpa"),
        ("gpt_oss", "flash_attention_2"),  # transformers would take kernels of another name in its place
        ("gemma2", "sdpa"),
        ("gpt2", "flex_attention"),
        ("bloom", "flash_attention_2"),
    ],
)
def test_an_attention_that_a_family_has_not_is_answered_with_those_that_it_has(
    family: str, asked: str, golden: Golden
) -> None:
    golden(refusal_of(of(family), asked))


@pytest.mark.parametrize("asked", ["sdpa", "flash_attention_2", "flex_attention"])
def test_a_model_without_attention_is_not_said_to_lack_a_kind_of_it(asked: str, golden: Golden) -> None:
    line = refusal_of(of("mamba"), asked)
    golden(line)
    assert line.endswith("use attention='eager'")


@pytest.mark.parametrize("family", [*ENCODERS, "megatron-bert", "roformer", "camembert", "data2vec-text"])
def test_an_encoder_is_refused_until_it_is_told_to_decode(family: str, golden: Golden) -> None:
    config = of(family) if family in ENCODERS else {**of("bert"), "model_type": family}
    line = refusal_of(config, "eager")
    golden(line)
    assert built({**config, "is_decoder": True}).config.is_decoder


def test_an_embedding_model_of_a_causal_family_is_refused(golden: Golden) -> None:
    line = refusal_of(of("gemma3_text", use_bidirectional_attention=True), "eager")
    golden(line)


@pytest.mark.parametrize(
    ("family", "says", "instead"),
    [
        ("xlm", {"causal": False}, r'write "causal": true into its configuration$'),
        ("xlnet", {"attn_type": "bi"}, r'write "attn_type": "uni" into its configuration$'),
        ("cpmant", {}, "expected a causal language model$"),  # no setting makes it one
    ],
)
def test_a_family_with_a_word_of_its_own_for_it_is_told_that_word(
    family: str, says: Mapping[str, object], instead: str
) -> None:
    with pytest.raises(RefusedError, match=f"^{family} .* no causal model, .* {instead}"):
        check_direction(type("Config", (), {"model_type": family, **says}))


@pytest.mark.parametrize("asked", ["sdpa", "eager"])
def test_a_decoder_whose_class_sets_what_its_configuration_leaves_open_is_built(asked: str) -> None:
    small = {"d_model": 64, "decoder_layers": 1, "encoder_layers": 1, "decoder_ffn_dim": 64, "vocab_size": 250}
    heads = {"decoder_attention_heads": 4, "encoder_attention_heads": 4}
    assert built({"model_type": "bart", **small, **heads}, asked).config.is_decoder
    assert built({"model_type": "gpt_neox", **FAMILIES["qwen2"]}, asked).config.is_decoder is False


def depends_on_what_follows(model: Any) -> bool:
    """Whether another last token changes what is said of an earlier one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weights in (one for one in model.parameters() if one.dim() > 1):
            weights.normal_(0, 0.2)  # as it begins, attention is so even that a token hardly matters
        tokens = torch.randint(3, 250, (1, 24))
        other = torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % 250], dim=1)
        one, two = (model.float().eval()(input_ids=each).logits[:, :-1] for each in (tokens, other))
    return not torch.allclose(one, two, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS, "gpt_neox"])
def test_what_is_not_refused_sees_nothing_of_what_follows(family: str) -> None:
    config = {"model_type": family, **FAMILIES["qwen2"]} if family == "gpt_neox" else of(family)
    attention = "eager" if family in NO_SDPA or family in ENCODERS else "sdpa"
    assert not depends_on_what_follows(
        built({**config, "is_decoder": True} if family in ENCODERS else config, attention)
    )


@pytest.mark.parametrize("family", ENCODERS)
def test_what_is_refused_would_have_seen_what_follows(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("pytest_llmperf.worker.build.check_direction", lambda _: None)
    assert depends_on_what_follows(built(of(family)))


def test_a_prediction_is_refused_in_the_same_words(golden: Golden) -> None:
    sdpa = TrainSpec(**{**SPEC.to_dict(), "attention": "sdpa"})
    with pytest.raises(RefusedError) as raised:
        plan(sdpa, of("gpt_oss"))
    golden(raised)
    with pytest.raises(RefusedError) as raised:
        plan(sdpa, of("bert"))
    golden(raised)
    flash = TrainSpec(**{**SPEC.to_dict(), "attention": "flash_attention_2"})
    with pytest.raises(ValueError, match="flash_attention_2 is not") as uncounted:
        plan(flash, of("gemma2"))
    golden(uncounted)


def test_a_name_that_a_configuration_does_not_have_changes_nothing_and_is_refused(golden: Golden) -> None:
    spec = replace(SPEC, model_kwargs={"num_hidden_layer": 1})
    with pytest.raises(RefusedError) as refused:
        build_model(spec, spec.architecture.config, torch.device("cpu"))
    golden(refused.value)


def test_what_a_launch_would_refuse_of_what_is_given_on_has_no_plan(golden: Golden) -> None:
    given: list[dict[str, Any]] = [
        {"model_kwargs": {"num_hidden_layer": 1}},
        {"training_arguments": {"torch_empty_cache_steps": 0}},
        {"training_arguments": {"accelerator_config": {"split": True}}},
    ]
    for values in given:
        spec = replace(SPEC, **values)
        with pytest.raises(RefusedError) as refused:
            plan(spec, spec.architecture.config)
        golden(refused.value)
    with pytest.raises(RefusedError, match="unexpected keyword argument"):
        build.training_arguments(replace(SPEC, **values), Path("none"), torch.device("cpu"), 5)


@pytest.mark.parametrize("family", ["llama", "opt", "gemma", *FAMILIES])
def test_linear_layers_of_a_family_are_those_that_transformers_builds(family: str) -> None:
    config: Mapping[str, Any] = of(family, **FAMILIES["gemma2"]) if family == "gemma" else of(family)
    config = config if len(config) > 1 else replace(SPEC, model=f"{family}-tiny").architecture.config
    model, found = Model("any", config, ""), []
    for name, module in built(config).named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and re.search(r"\.0\.", name):
            sizes = module.weight.shape[:: 1 if isinstance(module, Conv1D) else -1]
            found.append((name.rpartition(".")[2], *sizes))
    assert sorted(found) == sorted(model.linear_layers()) or not model.has_known_layers


def test_what_a_training_is_given_anyway_cannot_be_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TrainingArguments", dict)
    spec = replace(SPEC, gradient_checkpointing=True)
    given: Mapping[str, Any] = build.training_arguments(spec, tmp_path, torch.device("cpu"), 5)
    assert len(given) > 20
    # Batches are pinned for a GPU unless somebody says otherwise.
    for name in given.keys() - {"dataloader_pin_memory"}:
        with pytest.raises(SpecError, match=f"says {name}, which"):
            replace(SPEC, training_arguments={name: None})
