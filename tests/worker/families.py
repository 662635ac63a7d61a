"""Small configurations of model families that the package knows nothing of."""

from __future__ import annotations

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

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {**_SMALL, "head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_SMALL, "head_dim": 16, "sliding_window": 32},
    "gpt2": {"vocab_size": 250, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "mistral": {**_SMALL, "sliding_window": 32},
    "mixtral": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {**_SMALL, "tie_word_embeddings": True},
    "qwen3": {**_SMALL, "head_dim": 16},
    "gpt_oss": {**_SMALL, **_SPECIAL_TOKENS, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {**_SPECIAL_TOKENS, "vocab_size": 250, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}

# What they have no kernel for: scores capped between the two products, a sink beside them, no attention at all.
NO_SDPA = frozenset({"gemma2", "gpt_oss", "mamba"})

_ENCODER = {**_SMALL, **_SPECIAL_TOKENS, "num_key_value_heads": None}

#: Causal under ``is_decoder`` alone, which is not their default.
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    name: {key: value for key, value in _ENCODER.items() if value is not None}
    for name in ("bert", "roberta", "electra", "rembert", "xlm-roberta", "bert-generation")
}
