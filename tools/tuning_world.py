"""Configurations of which all is known: what a search of them should find."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

from pytest_llmperf.judge.tuning_search import Field

_AXES: Mapping[str, tuple[Any, ...]] = {
    "size": (1, 2, 4, 8, 16, 32, 64),
    "attention": ("eager", "sdpa", "flash"),
    "loss": (False, True),
    "norm": (False, True),
    "compile": ("no", "layers", "model"),
    "optimizer": ("plain", "fused"),
}
TRAITS = [dict(zip(_AXES, values, strict=True)) for values in itertools.product(*_AXES.values())]
FIELD = Field(
    traits=TRAITS,
    size="size",
    tokens=[1024 * traits["size"] for traits in TRAITS],
    compiles=[int(traits["compile"] != "no") for traits in TRAITS],
)


def world(seed: int) -> list[float]:
    """Of each the logarithm of seconds for a token: what each trait brings, and a little of what two bring together."""
    chance = random.Random(seed)  # noqa: S311 - a world, no secret
    own = {(name, str(value)): chance.uniform(0, 0.2) for name, values in _AXES.items() for value in values}
    together: dict[Any, float] = {}

    def cost(traits: Mapping[str, Any]) -> float:
        words = [(name, str(value)) for name, value in traits.items() if name != "size"]
        pairs = sum(together.setdefault(pair, chance.gauss(0, 0.005)) for pair in itertools.combinations(words, 2))
        return math.log((1 + 3 / traits["size"]) / 70_000) + sum(own[word] for word in words) + pairs

    return [cost(traits) for traits in TRAITS]
