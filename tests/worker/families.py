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

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {**_SMALL, "head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_SMALL, "head_dim": 16, "sliding_window": 32},
    "gpt2": {"vocab_size": 250, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "mistral": {**_SMALL, "sliding_window": 32},
    "mixtral": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {**_SMALL, "tie_word_embeddings": True},
    "qwen3": {**_SMALL, "head_dim": 16},
}
