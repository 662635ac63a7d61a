"""Model architectures: where their configuration comes from, their geometry and what they cost a token.

A model is always a Hugging Face configuration: one of the files in ``configs/``, a ``config.json`` (or the folder
that holds one) of the user's, or the cached configuration of a hub name. Nothing here needs torch or transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from pytest_llmperf.support.files import hashed, shipped
from pytest_llmperf.support.user_input import hint

_CONFIGS = Path(__file__).parent / "configs"

_NAMES = shipped(__file__, "sizes.ini")
_NOT_WORK = frozenset(" ".join(_NAMES["no work"].values()).split())

# What no configuration says of them. Some have the arithmetic of the plain decoder, by sizes that must be told.
_FAMILIES = shipped(__file__, "families.ini")
_OF_THE_FORMULA = {name: section["needs"].split() for name, section in _FAMILIES.items() if "needs" in section}

_SIZES = tuple(tuple(names.split()) for names in _NAMES["sizes"].values())
_LAYERS, _HIDDEN, _FEED_FORWARD, _HEADS, _KEY_VALUE_HEADS, _HEAD_SIZE, _VOCABULARY = _SIZES


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    return next((int(config[key]) for key in keys if isinstance(config.get(key), int)), None)


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
        attention = 2 * (self.num_heads + self.num_key_value_heads) * self.head_size
        layer = attention + self.num_feed_forward_matrices * self.feed_forward_size
        return self.hidden_size * (self.num_layers * layer + self.vocabulary_size)

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs (forward and backward, no recomputation) for one token of a full sequence: the matrix products
        of the PaLM paper (Chowdhery et al. 2022, appendix B), with grouped-query attention and the vocabulary's
        projection once. Llama 3.2 1B at 1,024 tokens: ``6 N + 12 layers hidden sequence`` = 7.82 GFLOP."""
        scores = 12 * sequence_length * self.num_heads * self.head_size
        return float(6 * self.weights + self.num_layers * scores)


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
        return _first(self.config, ("max_position_embeddings", "n_positions", "max_seq_len"))

    def flops_per_token(self, sequence_length: int) -> float | None:
        """As ``Geometry``'s, where the formula is right of this family; ``None``: only a count can tell."""
        needed, geometry = _OF_THE_FORMULA.get(self.model_type, []), self.geometry
        if geometry is None or not all(isinstance(self.config.get(key), int) for key in needed):
            return None
        # Where embeddings are narrower than the layers, there are products between the two.
        is_plain = self.config.get("word_embed_proj_dim") in (None, geometry.hidden_size)
        return geometry.flops_per_token(sequence_length) if is_plain else None

    def has_window(self, sequence_length: int) -> bool:
        """Whether a token of a sequence this long may see fewer than all before it."""
        window = self.config.get("sliding_window")
        return isinstance(window, int) and window < sequence_length

    @property
    def geometry(self) -> Geometry | None:
        """Sizes for the arithmetic; ``None`` for a family whose arithmetic is not known here (MoE, state space)."""
        return self.sizes if self.model_type in _OF_THE_FORMULA else None

    @cached_property
    def sizes(self) -> Geometry | None:
        """As a configuration has them, of any family: no arithmetic follows from them; ``None``: one is missing."""
        config = self.config
        layers, hidden, heads = _first(config, _LAYERS), _first(config, _HIDDEN), _first(config, _HEADS)
        vocabulary = _first(config, _VOCABULARY)
        if not (layers and hidden and heads and vocabulary):
            return None
        return Geometry(
            num_layers=layers,
            hidden_size=hidden,
            feed_forward_size=_first(config, _FEED_FORWARD) or 4 * hidden,
            num_heads=heads,
            num_key_value_heads=_first(config, _KEY_VALUE_HEADS) or heads,
            head_size=_first(config, _HEAD_SIZE) or hidden // heads,
            vocabulary_size=vocabulary,
            num_feed_forward_matrices=2 if _FAMILIES.getboolean(self.model_type, "plain", fallback=False) else 3,
        )

    @property
    def has_known_layers(self) -> bool:
        return self.sizes is not None and self.model_type in _FAMILIES

    def linear_layers(self) -> list[tuple[str, int, int]]:
        """Of one of its layers the name, width and output of each linear one; of a family unknown here, as most are."""
        if (sizes := self.sizes) is None:
            return []
        family = _FAMILIES[self.model_type if self.model_type in _FAMILIES else "DEFAULT"]
        (*ins, out), (*ups, down) = (family[part].split() for part in ("attention", "feed_forward"))
        hidden, own, shared = sizes.hidden_size, sizes.num_heads, sizes.num_key_value_heads
        heads = [own, shared, shared] if len(ins) > 1 else [own + 2 * shared]
        wide = sizes.feed_forward_size * (sizes.num_feed_forward_matrices - 1) // len(ups)
        return [
            *((name, hidden, number * sizes.head_size) for name, number in zip(ins, heads, strict=True)),
            (out, own * sizes.head_size, hidden),
            *((name, hidden, wide) for name in ups),
            (down, sizes.feed_forward_size, hidden),
        ]


@cache
def built_in_names() -> list[str]:
    """The models that need no file of the user's."""
    return sorted(path.stem for path in _CONFIGS.glob("*.json"))


def resolve(name: str) -> Model:
    """The model ``name``: built in, a path to a configuration, or a cached hub name; ``ValueError``: none is."""
    if name in built_in_names():
        return _built_in(name)
    try:
        path = _config_path(name)
        state = path.stat()
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be read, ~ of no user
        raise ValueError(f"model {name!r}: cannot be looked up ({why_not_found(error)})") from None
    config, fingerprint = _load(path.absolute(), state.st_mtime_ns, state.st_size)
    own = path.parent.name if path.name == "config.json" else path.stem
    if "snapshots" in path.parts:  # the hub's cache names folders by commit
        own = name.rsplit("/", 1)[-1]
    # Two configurations may share a folder name: the fingerprint keeps their ids, and so their baselines, apart.
    return Model(f"{slugged(own, 'model')}-{fingerprint[:6]}", config, fingerprint)


def changed(model: Model, values: Mapping[str, Any]) -> Model:
    """``model`` with these ``values`` in its configuration; ``ValueError``: sizes that cannot be."""
    config = {**model.config, **values}
    if model.model_type in _OF_THE_FORMULA and (problem := _size_problem(config)):
        raise ValueError(problem)
    return replace(model, config=config, fingerprint=_fingerprint(config))


@cache
def _built_in(name: str) -> Model:
    return Model(name, *_load(_CONFIGS / f"{name}.json", 0, 0))


def why_not_found(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def slugged(name: str, otherwise: str) -> str:
    """``name`` as ids spell it."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or otherwise


def _config_path(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"model {name!r}: the folder holds no config.json; name a Hugging Face model folder")
        return path
    if path.is_file():
        return path
    if name.endswith(".json"):
        raise ValueError(f"model {name!r}: no such file; give the path of a Hugging Face config.json")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        known = built_in_names()
        raise ValueError(
            f"unknown model {name!r}{hint(name, known)}; known: {', '.join(known)}, "
            "the path of a config.json or its folder, or a cached hub name"
        )
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - only hub names pay for this import

    cached = try_to_load_from_cache(name, "config.json")
    if not isinstance(cached, str):
        raise ValueError(
            f"model {name!r}: no such path, and not in the Hugging Face cache; "
            f"fetch it first with: hf download {name} config.json"
        )
    return Path(cached)


@lru_cache(maxsize=64)
def _load(path: Path, _mtime_ns: int, _size: int) -> tuple[dict[str, Any], str]:
    """The configuration and its fingerprint; a file that was changed, or another one of its name, is read anew."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        fingerprint = _fingerprint(config)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model config {path}: cannot be read ({error})") from error
    except ValueError as error:  # broken, or a number of thousands of digits
        raise ValueError(f"model config {path}: not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(f"model config {path}: nested too deeply ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f'model config {path}: not a Hugging Face configuration, it has no "model_type"')
    if config["model_type"] in _OF_THE_FORMULA and (problem := _size_problem(config)):  # others may say what they like
        raise ValueError(f"model config {path}: {problem}")
    return config, fingerprint


def _fingerprint(config: Any) -> str:
    work = {key: config[key] for key in config if key not in _NOT_WORK} if isinstance(config, dict) else {}
    return hashed(json.dumps(work, sort_keys=True, separators=(",", ":")))


def _size_problem(config: Mapping[str, Any]) -> str:
    for key in (*_LAYERS, *_HIDDEN, *_FEED_FORWARD, *_HEADS, *_KEY_VALUE_HEADS, *_HEAD_SIZE, *_VOCABULARY):
        value = config.get(key)  # null means the family's default
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            return f"{key}={value!r} must be a whole number of at least 1"
    hidden, heads, key_value_heads = (_first(config, keys) for keys in (_HIDDEN, _HEADS, _KEY_VALUE_HEADS))
    if hidden and heads and hidden % heads and not _first(config, _HEAD_SIZE):
        return f"{heads} attention heads do not divide a hidden size of {hidden}"
    if heads and key_value_heads and heads % key_value_heads:
        return f"{key_value_heads} key-value heads do not divide {heads} attention heads"
    return ""


# A model's configuration made small: the same architecture, in seconds and megabytes, with no more than these. Heads
# keep their size and a share of their groups, since kernels are chosen by both; the vocabulary stays wider than the
# layers, so that a fused loss still takes it in several pieces.
_SMALL_LAYERS, _SMALL_HEADS, _GROUPS, _GROUPED, _EXPERTS, _SMALL_VOCABULARY = 2, 4, 2, 4, 4, 1024
# Widths that matrix units take in any precision.
_MULTIPLE = 16


def small_config(config: Mapping[str, Any], shrinks: float = 1.0) -> dict[str, Any]:
    """``config`` narrow, with few layers, no dropout and a window ``shrinks`` times as long; the rest as it is."""
    small: dict[str, Any] = {name: 0.0 if is_dropout(name, value) else value for name, value in config.items()}
    _narrow(small)
    if layers := _first(config, _LAYERS):
        kinds = config.get("layer_types")
        if isinstance(kinds, Sequence):  # as many as are kept, and no kind of layer lost
            found = list(dict.fromkeys(kinds))
            small["layer_types"] = [*found, *kinds[len(found) : _SMALL_LAYERS]]
            layers = len(small["layer_types"])
        else:
            layers = min(layers, _SMALL_LAYERS)
        _set(small, _LAYERS, layers)
    if isinstance(config.get("sliding_window"), int):
        small["sliding_window"] = max(1, round(config["sliding_window"] * shrinks))
    for name in ("num_local_experts", "num_experts"):
        if isinstance(config.get(name), int):
            small[name] = max(min(config[name], _EXPERTS), config.get("num_experts_per_tok") or 1)
    if vocabulary := _first(config, _VOCABULARY):
        least = min(vocabulary, _SMALL_VOCABULARY)
        _set(small, _VOCABULARY, least)
        for name, value in config.items():
            if name.endswith("_token_id") and isinstance(value, int) and value >= least:
                small[name] = None
    return small


def is_dropout(name: str, value: object) -> bool:
    """Whether a configuration's entry drops something at random."""
    is_share = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return is_share and name.endswith(("dropout", "_pdrop", "layerdrop", "dropout_prob"))


def _narrow(small: dict[str, Any]) -> None:
    hidden, heads = _first(small, _HIDDEN), _first(small, _HEADS)
    if not hidden or not heads:
        return
    groups = _first(small, _KEY_VALUE_HEADS)
    head_size = _first(small, _HEAD_SIZE) or hidden // heads
    if groups and groups < heads:
        groups, per_group = min(groups, _GROUPS), min(heads // groups, _GROUPED)
        few = groups * per_group
    else:
        few = min(heads, _SMALL_HEADS)
        groups = groups and few
    width = min(hidden, few * head_size)
    for name in ("word_embed_proj_dim", "embedding_size"):
        if small.get(name) == hidden:
            small[name] = width
    _set(small, _HIDDEN, width)
    _set(small, _HEADS, few)
    if groups:
        _set(small, _KEY_VALUE_HEADS, groups)
    if forward := _first(small, _FEED_FORWARD):
        _set(small, _FEED_FORWARD, max(_MULTIPLE, forward * width // hidden // _MULTIPLE * _MULTIPLE))


def _set(config: dict[str, Any], names: Sequence[str], value: int) -> None:
    for name in names:
        if isinstance(config.get(name), int):
            config[name] = value
