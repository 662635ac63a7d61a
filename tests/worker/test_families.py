"""Models of other families train and are watched from their configuration alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.launch import Launch
from tests.worker import launching
from tests.worker.families import ENCODERS, FAMILIES, NO_SDPA, small

torch = pytest.importorskip("torch")

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: E402 - they need torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL  # noqa: E402

from pytest_llmperf.records.ranks import RefusedError  # noqa: E402
from pytest_llmperf.worker.build import build_model  # noqa: E402
from pytest_llmperf.worker.settings.attention import attentions_of  # noqa: E402
from pytest_llmperf.worker.settings.precision import kept_dtypes, parameter_dtypes  # noqa: E402

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


def launch(
    folder: Path, config: Mapping[str, Any], attention: str, **settings: Any
) -> tuple[TrainSpec, Launch | Failure]:
    path = folder / config["model_type"]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    spec = TrainSpec(
        model=str(path),
        attention=attention,
        micro_batch_size=2,
        warmup_steps=2,
        **{
            "steps": 6,
            "min_steps": 6,
            "sequence_length": 60,
            "gradient_checkpointing": attention == "eager",
            **settings,
        },
    )
    return spec, launching.launch(spec, folder / "run")


def of(family: str) -> dict[str, Any]:
    return {"model_type": family, **{**FAMILIES, **ENCODERS}[family]}


# One of each kind, all others where every type of transformers is tried: scores without a kernel, no attention, experts
# beside a router in fp32, latent attention, linear attention.
EACH_KIND = frozenset({"deepseek_v3", "ernie4_5_moe", "gpt_oss", "mamba", "olmo_hybrid"})


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in EACH_KIND else [pytest.mark.wide]) for each in FAMILIES]
)
def test_it_trains_and_what_was_asked_for_was_active(tmp_path: Path, family: str) -> None:
    spec, ran = launch(tmp_path, of(family), "eager" if family in NO_SDPA else "sdpa")
    assert spec.model_precision == "bf16"
    assert isinstance(ran, Launch), ran
    assert troubles(spec, ran) == ()
    assert ran.tokens_per_step == 120
    assert spec.id.startswith(family.replace("_", "-"))


@pytest.mark.parametrize(
    ("family", "said"),
    [("gpt_oss", "gpt_oss has no attention='sdpa' in "), ("bert", "bert with is_decoder=False is no causal model, ")],
)
def test_what_is_refused_is_one_line_and_no_error_of_a_rank(tmp_path: Path, family: str, said: str) -> None:
    _, ran = launch(tmp_path, of(family), "sdpa")
    assert isinstance(ran, Failure)
    assert ran.kind == "refused"
    assert ran.message.startswith(said)
    assert "\n" not in ran.message
    assert ran.tail == ()


def test_weights_that_no_text_reaches_are_one_line(tmp_path: Path) -> None:
    """A decoder of a translator: it attends to an encoder that is not there."""
    config = {"model_type": "bart", "vocab_size": 128, "d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 64}
    _, ran = launch(tmp_path, {**config, "decoder_attention_heads": 4}, "sdpa", steps=4, min_steps=4)
    assert isinstance(ran, Failure)
    assert ran.kind == "refused"
    assert ran.message == (
        "bart: 20 of 56 weights get no gradient from text (first: model.decoder.layers.0.encoder_attn.k_proj.weight); "
        "expected a causal language model without parts for other input, and of kernels ones with a backward pass"
    )


def test_of_a_model_that_sees_the_text_part_trains() -> None:
    text = {**FAMILIES["gemma3_text"], "model_type": "gemma3_text"}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {**vision, "intermediate_size": 64}}
    model = build_model(TrainSpec(model="llama-tiny", attention="sdpa"), config, torch.device("meta"))
    assert type(model).__name__ == "Gemma3ForCausalLM"


def test_what_transformers_cannot_build_is_one_line() -> None:
    config = {"model_type": "gemma2", **FAMILIES["gemma2"], "num_attention_heads": "four"}
    with pytest.raises(RefusedError, match=r"^transformers \S+ cannot build gemma2 from this configuration: "):
        build_model(TrainSpec(model="llama-tiny", attention="eager"), config, torch.device("meta"))


@pytest.mark.parametrize("family", ["ernie4_5_moe", "olmo_hybrid"])
def test_only_what_the_class_keeps_in_fp32_is_excused(family: str) -> None:
    model = build_model(TrainSpec(model="llama-tiny", attention="sdpa"), of(family), torch.device("cpu"))
    kept = kept_dtypes(model, torch.bfloat16)
    assert kept == {"torch.float32": parameter_dtypes(model)["torch.float32"]}
    model.get_input_embeddings().float()
    assert kept_dtypes(model, torch.bfloat16) == kept
    assert parameter_dtypes(model)["torch.float32"] > kept["torch.float32"]


#: Of these text trains a part of the weights, or a token sees those after it: refused in a line.
REFUSED = frozenset(
    """
    axk2 bart big_bird bigbird_pegasus blenderbot blenderbot-small cpmant deepseek_v4 glm_moe_dsa
    marian mbart mvp pegasus phi4_multimodal plbart prophetnet trocr whisper xlm xlnet
""".split()
)
#: Their defaults, made small by names, do not fit one another, which a line says.
UNFIT = frozenset(
    """
    axk1 bailing_hybrid beam blt cohere_compass_text dbrx deepseek_v32 dots1 dots3_note
    dots3_note_text gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified
    gemma4_unified_assistant gemma4_unified_text git hy_v4 longcat_flash musicgen musicgen_melody
    qwen4_exp qwen4_exp_text reformer
""".split()
)
#: So small they are not as they were asked for, and a launch says so: a router without a gradient, another attention.
INVALID = frozenset({"hunyuan_v1_moe", "roc_bert"})


@pytest.mark.wide
@pytest.mark.parametrize("family", sorted(CAUSAL))
def test_every_causal_type_trains_or_gets_one_line(tmp_path: Path, family: str) -> None:
    if family == "gemma4_assistant":
        pytest.skip("transformers refuses its own defaults")
    config = small({**CONFIG_MAPPING[family]().to_dict(), "model_type": family})
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
    attention = "sdpa" if "sdpa" in attentions_of(kind) else "eager"
    spec, ran = launch(
        tmp_path, config, attention, steps=4, min_steps=4, sequence_length=32, gradient_checkpointing=False
    )
    if isinstance(ran, Failure):
        assert "\n" not in ran.message
        assert family in REFUSED | UNFIT, ran.message
        assert ran.kind == "refused" or family in UNFIT, ran.message
    else:
        assert (troubles(spec, ran) == ()) == (family not in INVALID)
