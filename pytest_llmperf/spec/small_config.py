"""A model's configuration made small: the same architecture, in seconds and megabytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llmperf.spec import models

#: No more than these. Heads keep their size and a share of their groups, since kernels are chosen by both; the
#: vocabulary stays wider than the layers, so that a fused loss still takes it in several pieces.
LAYERS, HEADS, GROUPS, GROUPED, EXPERTS, VOCABULARY = 2, 4, 2, 4, 4, 1024

# Widths that matrix units take in any precision.
_MULTIPLE = 16


def small_config(config: Mapping[str, Any], shrinks: float = 1.0) -> dict[str, Any]:
    """``config`` with few layers, narrow, without dropout, and its sliding window ``shrinks`` times as long.

    What it does not know (a family of other words, parts for other senses) it leaves as it is.
    """
    small: dict[str, Any] = {name: 0.0 if is_dropout(name, value) else value for name, value in config.items()}
    _narrow(small)
    layers = _first(config, models.LAYERS)
    if layers:
        _set(small, models.LAYERS, min(layers, LAYERS))
        if isinstance(config.get("layer_types"), Sequence):
            kinds = _one_of_each(config["layer_types"])
            small["layer_types"] = kinds
            _set(small, models.LAYERS, len(kinds))
    if isinstance(config.get("sliding_window"), int):
        small["sliding_window"] = max(1, round(config["sliding_window"] * shrinks))
    for name in ("num_local_experts", "num_experts"):
        if isinstance(config.get(name), int):
            small[name] = max(min(config[name], EXPERTS), config.get("num_experts_per_tok") or 1)
    vocabulary = _first(config, models.VOCABULARY)
    if vocabulary:
        least = min(vocabulary, VOCABULARY)
        _set(small, models.VOCABULARY, least)
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
    hidden, heads = _first(small, models.HIDDEN), _first(small, models.HEADS)
    if not hidden or not heads:
        return
    groups = _first(small, models.KEY_VALUE_HEADS)
    head_size = _first(small, models.HEAD_SIZE) or hidden // heads
    if groups and groups < heads:
        groups, per_group = min(groups, GROUPS), min(heads // groups, GROUPED)
        few = groups * per_group
    else:
        few = min(heads, HEADS)
        groups = groups and few
    width = min(hidden, few * head_size)
    for name, value in small.items():
        if name in ("word_embed_proj_dim", "embedding_size") and value == hidden:
            small[name] = width
    _set(small, models.HIDDEN, width)
    _set(small, models.HEADS, few)
    if groups:
        _set(small, models.KEY_VALUE_HEADS, groups)
    forward = _first(small, models.FEED_FORWARD)
    if forward:
        _set(small, models.FEED_FORWARD, max(_MULTIPLE, forward * width // hidden // _MULTIPLE * _MULTIPLE))


def _one_of_each(kinds: Sequence[str]) -> list[str]:
    """As many as are kept, and no kind of layer lost."""
    found = list(dict.fromkeys(kinds))
    return [*found, *kinds[len(found) : LAYERS]]


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)


def _set(config: dict[str, Any], names: Sequence[str], value: int) -> None:
    for name in names:
        if isinstance(config.get(name), int):
            config[name] = value
