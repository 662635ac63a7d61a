"""Model architectures: where their configuration comes from, their geometry and what they cost a token.

A model is always a Hugging Face configuration: one of the files in ``configs/``, a ``config.json`` (or the folder
that holds one) of the user's, or the cached configuration of a hub name. Nothing here needs torch or transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_llmperf.support.suggestions import hint

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

    @property
    def weights(self) -> int:
        """Elements of the matrices, the vocabulary's counted once; norms and positions are left out."""
        attention, key_value = self.num_heads * self.head_size, self.num_key_value_heads * self.head_size
        layer = 2 * attention + 2 * key_value + self.num_feed_forward_matrices * self.feed_forward_size
        return self.hidden_size * (self.num_layers * layer + self.vocabulary_size)

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

    def flops_per_token(self, sequence_length: int) -> float | None:
        """As ``Geometry``'s, where the formula is right of this family; ``None``: only a count can tell."""
        needed = _OF_THE_FORMULA.get(self.model_type)
        if needed is None or self.geometry is None or not all(isinstance(self.config.get(key), int) for key in needed):
            return None
        if any(self.config.get(key) not in (None, self.geometry.hidden_size) for key in _OTHER_WIDTHS):
            return None
        return self.geometry.flops_per_token(sequence_length)

    def has_window(self, sequence_length: int) -> bool:
        """Whether a token of a sequence this long may see fewer than all before it."""
        window = self.config.get("sliding_window")
        return isinstance(window, int) and window < sequence_length

    @property
    def geometry(self) -> Geometry | None:
        """Sizes for the arithmetic; ``None`` for a family whose arithmetic is not known here (MoE, state space)."""
        return _geometry(self.config)


def built_in_names() -> list[str]:
    """The models that need no file of the user's."""
    return sorted(path.stem for path in _CONFIGS.glob("*.json"))


def resolve(name: str) -> Model:
    """The model called ``name``: built in, a path to a configuration, or a cached hub name.

    Raises:
        ValueError: unknown name (with the nearest known one), or a file that is no usable configuration.
    """
    try:
        built_in = name in _built_in()
        path = _CONFIGS / f"{name}.json" if built_in else _config_path(name)
        state = path.stat()
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be read, ~ of no user
        raise ValueError(f"model {name!r}: cannot be looked up ({_reason(error)})") from None
    config, fingerprint = _load(path.absolute(), state.st_mtime_ns, state.st_size)
    # Two configurations may share a folder name: the fingerprint keeps their ids, and so their baselines, apart.
    slug = name if built_in else f"{_slug(name, path)}-{fingerprint[:6]}"
    return Model(slug=slug, config=config, fingerprint=fingerprint)


@lru_cache(maxsize=1)
def _built_in() -> frozenset[str]:
    return frozenset(built_in_names())


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _config_path(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"model {name!r}: the folder holds no config.json; name a Hugging Face model folder")
        return path
    return path if path.is_file() else _cached_on_hub(name)


@lru_cache(maxsize=64)
def _load(path: Path, _mtime_ns: int, _size: int) -> tuple[dict[str, Any], str]:
    """The configuration and its fingerprint; a file that was changed, or another one of its name, is read anew."""
    try:
        config = _read_config(path)
        fingerprint = _fingerprint(config)
    except RecursionError as error:
        raise ValueError(f"model config {path}: nested too deeply ({error})") from None
    _check_sizes(config, path)
    return config, fingerprint


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
    raise ValueError(
        f"unknown model {name!r}{hint(name, built_in_names())}; known: {', '.join(built_in_names())}, "
        "the path of a config.json or its folder, or a cached hub name"
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model config {path}: cannot be read ({error})") from error
    except ValueError as error:  # broken, or a number of thousands of digits
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


# Families of which a count finds the formula's FLOPs to the last one, and the sizes that they need to be told: those
# they would not take from their other sizes.
_OF_THE_FORMULA: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "phi3", "olmo2", "gpt_neox"), ("intermediate_size",)),
    **dict.fromkeys(("mistral", "qwen2", "smollm3"), ("intermediate_size", "num_key_value_heads")),
    **dict.fromkeys(("gemma", "gemma2", "qwen3"), ("intermediate_size", "num_key_value_heads", "head_dim")),
    "opt": ("ffn_dim",),
    "gpt2": (),
}
# Where embeddings are narrower than the layers, there are products between the two.
_OTHER_WIDTHS = ("word_embed_proj_dim",)


#: Each size, under every name that a family gives it.
LAYERS = ("num_hidden_layers", "n_layer")
HIDDEN = ("hidden_size", "n_embd")
FEED_FORWARD = ("intermediate_size", "ffn_dim", "n_inner")
HEADS = ("num_attention_heads", "n_head")
KEY_VALUE_HEADS = ("num_key_value_heads",)
HEAD_SIZE = ("head_dim",)
VOCABULARY = ("vocab_size",)
_SIZES = (*LAYERS, *HIDDEN, *FEED_FORWARD, *HEADS, *KEY_VALUE_HEADS, *HEAD_SIZE, *VOCABULARY)


def _check_sizes(config: Mapping[str, Any], path: Path) -> None:
    if config["model_type"] not in _GATED | _PLAIN:
        return  # what another family may say is not known here
    for key in _SIZES:
        value = config.get(key)  # null means the family's default
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"model config {path}: {key}={value!r} must be a whole number of at least 1")
    hidden, heads, key_value_heads = (_first(config, keys) for keys in (HIDDEN, HEADS, KEY_VALUE_HEADS))
    if hidden and heads and hidden % heads and not _first(config, HEAD_SIZE):
        raise ValueError(f"model config {path}: {heads} attention heads do not divide a hidden size of {hidden}")
    if heads and key_value_heads and heads % key_value_heads:
        raise ValueError(
            f"model config {path}: {key_value_heads} key-value heads do not divide {heads} attention heads"
        )


def _first(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    return next((int(config[key]) for key in keys if isinstance(config.get(key), int)), None)


def _geometry(config: Mapping[str, Any]) -> Geometry | None:
    model_type = config["model_type"]
    layers, hidden, heads = _first(config, LAYERS), _first(config, HIDDEN), _first(config, HEADS)
    vocabulary = _first(config, VOCABULARY)
    if model_type not in _GATED | _PLAIN or not (layers and hidden and heads and vocabulary):
        return None
    return Geometry(
        num_layers=layers,
        hidden_size=hidden,
        feed_forward_size=_first(config, FEED_FORWARD) or 4 * hidden,
        num_heads=heads,
        num_key_value_heads=_first(config, KEY_VALUE_HEADS) or heads,
        head_size=_first(config, HEAD_SIZE) or hidden // heads,
        vocabulary_size=vocabulary,
        num_feed_forward_matrices=3 if model_type in _GATED else 2,
    )


# A model's configuration made small: the same architecture, in seconds and megabytes. Pure.


#: No more than these. Heads keep their size and a share of their groups, since kernels are chosen by both; the
#: vocabulary stays wider than the layers, so that a fused loss still takes it in several pieces.
SMALL_LAYERS, SMALL_HEADS, GROUPS, GROUPED, EXPERTS, SMALL_VOCABULARY = 2, 4, 2, 4, 4, 1024

# Widths that matrix units take in any precision.
_MULTIPLE = 16


def small_config(config: Mapping[str, Any], shrinks: float = 1.0) -> dict[str, Any]:
    """``config`` with few layers, narrow, without dropout, and its sliding window ``shrinks`` times as long.

    What it does not know (a family of other words, parts for other senses) it leaves as it is.
    """
    small: dict[str, Any] = {name: 0.0 if is_dropout(name, value) else value for name, value in config.items()}
    _narrow(small)
    layers = _first(config, LAYERS)
    if layers:
        _set(small, LAYERS, min(layers, SMALL_LAYERS))
        if isinstance(config.get("layer_types"), Sequence):
            kinds = _one_of_each(config["layer_types"])
            small["layer_types"] = kinds
            _set(small, LAYERS, len(kinds))
    if isinstance(config.get("sliding_window"), int):
        small["sliding_window"] = max(1, round(config["sliding_window"] * shrinks))
    for name in ("num_local_experts", "num_experts"):
        if isinstance(config.get(name), int):
            small[name] = max(min(config[name], EXPERTS), config.get("num_experts_per_tok") or 1)
    vocabulary = _first(config, VOCABULARY)
    if vocabulary:
        least = min(vocabulary, SMALL_VOCABULARY)
        _set(small, VOCABULARY, least)
        for name, value in config.items():
            if name.endswith("_token_id") and isinstance(value, int) and value >= least:
                small[name] = None
    return small


def is_dropout(name: str, value: object) -> bool:
    """Whether a configuration's entry drops something at random."""
    return (
        name.endswith(("dropout", "_pdrop", "layerdrop", "dropout_prob"))
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value > 0
    )


def _narrow(small: dict[str, Any]) -> None:
    hidden, heads = _first(small, HIDDEN), _first(small, HEADS)
    if not hidden or not heads:
        return
    groups = _first(small, KEY_VALUE_HEADS)
    head_size = _first(small, HEAD_SIZE) or hidden // heads
    if groups and groups < heads:
        groups, per_group = min(groups, GROUPS), min(heads // groups, GROUPED)
        few = groups * per_group
    else:
        few = min(heads, SMALL_HEADS)
        groups = groups and few
    width = min(hidden, few * head_size)
    for name, value in small.items():
        if name in ("word_embed_proj_dim", "embedding_size") and value == hidden:
            small[name] = width
    _set(small, HIDDEN, width)
    _set(small, HEADS, few)
    if groups:
        _set(small, KEY_VALUE_HEADS, groups)
    forward = _first(small, FEED_FORWARD)
    if forward:
        _set(small, FEED_FORWARD, max(_MULTIPLE, forward * width // hidden // _MULTIPLE * _MULTIPLE))


def _one_of_each(kinds: Sequence[str]) -> list[str]:
    """As many as are kept, and no kind of layer lost."""
    found = list(dict.fromkeys(kinds))
    return [*found, *kinds[len(found) : SMALL_LAYERS]]


def _set(config: dict[str, Any], names: Sequence[str], value: int) -> None:
    for name in names:
        if isinstance(config.get(name), int):
            config[name] = value
