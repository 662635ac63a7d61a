"""Small configurations of model families that the package knows nothing of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SMALL = {
    "vocab_size": 250,  # no multiple of 8: a vocabulary need not be one
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Latent attention: values of another size than queries and keys.
_LATENT = {
    **_SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

#: With routers, gates or decay rates that some keep in fp32 among weights of bf16.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {
        **_LATENT,
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {**_SMALL, **_EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": {**_SMALL, "layer_types": ["full_attention"] * 2},
    "gemma2": {**_SMALL, "head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_SMALL, "head_dim": 16, "sliding_window": 32},
    "glm4": {**_SMALL, "head_dim": 16, "pad_token_id": 0},
    "gpt2": {"vocab_size": 250, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {key: value for key, value in _SMALL.items() if key != "num_key_value_heads"},
    "gpt_oss": {**_SMALL, **_SPECIAL_TOKENS, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": _SMALL,
    "mamba": {**_SPECIAL_TOKENS, "vocab_size": 250, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "mistral": {**_SMALL, "sliding_window": 32},
    "mixtral": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": _SMALL,
    "olmo_hybrid": {
        **_SMALL,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
    "phi3": {**_SMALL, **_SPECIAL_TOKENS},
    "qwen2": {**_SMALL, "tie_word_embeddings": True},
    "qwen3": {**_SMALL, "head_dim": 16},
    "qwen3_moe": {**_SMALL, **_EXPERTS, "head_dim": 16, "num_experts": 4},
    "smollm3": {**_SMALL, **_SPECIAL_TOKENS},
}

# What they have no kernel for: scores capped between the two products, a sink beside them, no attention at all.
NO_SDPA = frozenset({"gemma2", "gpt_oss", "mamba"})

_ENCODER = {**_SMALL, **_SPECIAL_TOKENS, "num_key_value_heads": None}

#: Causal under ``is_decoder`` alone, which is not their default.
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    name: {key: value for key, value in _ENCODER.items() if value is not None}
    for name in ("bert", "roberta", "electra", "rembert", "xlm-roberta", "bert-generation")
}

# By what a setting is called, the most that it has in a small model: the first that fits.
_CAPS = {
    re.compile(pattern): cap
    for pattern, cap in {
        r"num_experts_per_tok|top_k|topk|moe_k|num_selected": 2,
        r"(n_group|topk_group|n_groups|n(um)?_shared_experts)$": 1,
        r"(n|num)_(local_|routed_|total_)?experts$|moe_num_experts$": 4,
        r"(num_key_value_heads|n_head_kv|num_kv_heads|kv_heads)$": 2,
        r"(attention_heads|n_heads?|num_heads)$": 4,
        r"(hidden_size|d_model|n_embd|dim|word_embed_proj_dim|embedding_size|hidden_dim)$": 64,
        r"(intermediate_size\w*|ffn_dim|n_inner|d_ff|feed_forward\w*)$": 64,
        r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|depth|num_blocks)$": 2,
        r"qk_rope_head_dim": 8,
        r"head_dim$|d_kv$": 16,
        r"lora_rank": 16,
        r"vocab_size\w*$": 128,
        r"image_size": 32,
    }.items()
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Any family's default ``config``, tiny: capped by what its settings are called, two layers and no dropout."""
    layers = next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), None)
    made: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and (name.endswith("config") or "model_type" in value):
            made[name] = small(value)
        elif isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
            layers_own = {key: own for key, own in value.items() if int(key) < 2}
            made[name] = {key: small(own) if isinstance(own, Mapping) else own for key, own in layers_own.items()}
        elif isinstance(value, list) and layers and len(value) == layers:
            made[name] = value[-2:] if len({*map(str, value)}) > 1 else value[:2]  # the last two are most often unlike
        elif name.endswith("_token_id") and isinstance(value, int) and value >= 128:
            made[name] = 0
        elif isinstance(value, float) and "drop" in name:
            made[name] = 0.0
        elif type(value) is int:
            cap = next((cap for pattern, cap in _CAPS.items() if pattern.search(name)), value)
            made[name] = min(value, cap)
        else:
            made[name] = value
    if made.get("kv_lora_rank"):
        made["num_key_value_heads"] = made["num_attention_heads"]
    made |= {"is_decoder": True} if made.get("is_decoder") is False else {}
    return {**made, **_OWN.get(str(made.get("model_type")), {})}


# What a family's sizes have to do with one another, or its defaults leave out.
_OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    # Three layers, before, in and after its loop, each of two blocks.
    "dory": {
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 2),
        "num_hidden_layers": 6,
        "layer_types": ["full_attention", "mlp"] * 3,
    },
    "dots1": {"n_routed_experts": 4, "moe_intermediate_size": 32, "n_shared_experts": 1},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_n_groups": 1},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1},
    "gptj": {"rotary_dim": 8},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling2_loop_text": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1, "expand": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"mamba_headdim": 32, "n_mamba_heads": 4, "mamba_ngroups": 1},
}
