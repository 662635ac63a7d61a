"""Model architectures: where their configuration comes from, their geometry and what they cost a token.

A model is always a Hugging Face configuration: one of the files in ``configs/``, a ``config.json`` (or the folder
that holds one) of the user's, or the cached configuration of a hub name. Nothing here needs torch or transformers.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_CONFIGS = Path(__file__).parent / "configs"

# What a configuration says about its file and not about the work it describes.
_NOT_WORK = frozenset(
    {"_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "_attn_implementation"}
)


@dataclass(frozen=True)
class Geometry:
    """The sizes of a decoder-only transformer that decide its parameters and its arithmetic."""

    num_layers: int
    hidden_size: int
    feed_forward_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    num_feed_forward_matrices: int

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs (forward and backward, no recomputation) for one token of a full sequence.

        The matrix-product count of the PaLM paper (Chowdhery et al. 2022, appendix B), with grouped-query attention
        and the vocabulary projection counted once: for Llama 3.2 1B at 1,024 tokens it equals
        ``6 N + 12 layers hidden sequence`` = 7.82 GFLOP.
        """
        hidden, attention_size = self.hidden_size, self.num_heads * self.head_size
        key_value_size = self.num_key_value_heads * self.head_size
        projections = 6 * hidden * (2 * attention_size + 2 * key_value_size)
        scores = 12 * sequence_length * attention_size
        feed_forward = 6 * self.num_feed_forward_matrices * hidden * self.feed_forward_size
        return float(self.num_layers * (projections + scores + feed_forward) + 6 * self.vocabulary_size * hidden)


@dataclass(frozen=True)
class Model:
    """A resolved model: the name in ids, its configuration, and what is known of its geometry."""

    slug: str
    config: Mapping[str, Any]
    fingerprint: str

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def max_sequence_length(self) -> int | None:
        """Positions the model has, in tokens; ``None`` where its configuration does not say."""
        for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if isinstance(self.config.get(key), int):
                return int(self.config[key])
        return None

    @property
    def geometry(self) -> Geometry | None:
        """Sizes for the arithmetic; ``None`` for a family whose arithmetic is not known here (MoE, state space)."""
        return _geometry(self.config)


def built_in_names() -> list[str]:
    """The models that need no file of the user's."""
    return sorted(path.stem for path in _CONFIGS.glob("*.json"))


@lru_cache(maxsize=64)
def resolve(name: str) -> Model:
    """The model called ``name``: built in, a path to a configuration, or a cached hub name.

    Raises:
        ValueError: unknown name (with the nearest known one), or a file that is no usable configuration.
    """
    if name in built_in_names():
        config = _read_config(_CONFIGS / f"{name}.json")
        return Model(slug=name, config=config, fingerprint=_fingerprint(config))
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"model {name!r}: the folder holds no config.json; name a Hugging Face model folder")
    elif not path.is_file():
        path = _cached_on_hub(name)
    config = _read_config(path)
    fingerprint = _fingerprint(config)
    # Two configurations may share a folder name: the fingerprint keeps their ids, and so their baselines, apart.
    return Model(slug=f"{_slug(name, path)}-{fingerprint[:6]}", config=config, fingerprint=fingerprint)


def _cached_on_hub(name: str) -> Path:
    if name.endswith(".json"):
        raise ValueError(f"model {name!r}: no such file; give the path of a Hugging Face config.json")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - only hub names pay for this import

        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        raise ValueError(
            f"model {name!r}: no such path, and not in the Hugging Face cache; "
            f"fetch it first with: hf download {name} config.json"
        )
    nearest = difflib.get_close_matches(name, built_in_names(), n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(
        f"unknown model {name!r}: {hint}known are {', '.join(built_in_names())}, "
        "the path of a config.json or its folder, or a cached hub name"
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model config {path}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"model config {path}: not JSON ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f'model config {path}: not a Hugging Face configuration, it has no "model_type"')
    return config


def _slug(name: str, path: Path) -> str:
    stem = path.parent.name if path.name == "config.json" else path.stem
    if "snapshots" in path.parts:  # the hub's cache names folders by commit
        stem = name.rsplit("/", 1)[-1]
    return re.sub(r"[^a-z0-9.]+", "-", stem.lower()).strip("-") or "model"


def _fingerprint(config: Mapping[str, Any]) -> str:
    work = {key: value for key, value in config.items() if key not in _NOT_WORK}
    return hashlib.sha256(json.dumps(work, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


# Families whose arithmetic is the plain decoder's, with the matrices of their feed-forward block
# (gated: up, gate, down; plain: up, down).
_GATED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "smollm3", "olmo2"})
_PLAIN = frozenset({"opt", "gpt2", "gpt_neox"})


def _geometry(config: Mapping[str, Any]) -> Geometry | None:
    def first(*keys: str) -> int | None:
        return next((int(config[key]) for key in keys if isinstance(config.get(key), int)), None)

    model_type = config["model_type"]
    layers, hidden = first("num_hidden_layers", "n_layer"), first("hidden_size", "n_embd")
    heads, vocabulary = first("num_attention_heads", "n_head"), first("vocab_size")
    if model_type not in _GATED | _PLAIN or not (layers and hidden and heads and vocabulary):
        return None
    return Geometry(
        num_layers=layers,
        hidden_size=hidden,
        feed_forward_size=first("intermediate_size", "ffn_dim", "n_inner") or 4 * hidden,
        num_heads=heads,
        num_key_value_heads=first("num_key_value_heads") or heads,
        head_size=first("head_dim") or hidden // heads,
        vocabulary_size=vocabulary,
        num_feed_forward_matrices=3 if model_type in _GATED else 2,
    )
