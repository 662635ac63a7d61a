"""A launch as a ``--perf-json`` file has it, where strict JSON has no word for what is no number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_llmperf.records.launch import Launch

_FIGURES = ("losses", "gradient_norms")


def results_launch(values: Mapping[str, Any]) -> Launch:
    """The launch of a training that may have gone wrong: its losses and norms are no numbers where they are null.

    Raises:
        LookupError, TypeError, ValueError: it is none.
    """
    figures = {name: _numbers(values[name]) for name in _FIGURES if name in values}
    learning = values.get("learning")
    if isinstance(learning, Mapping):
        figures["learning"] = _numbers(learning)
    return Launch.from_dict({**values, **figures})


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_numbers, value))
    if isinstance(value, Mapping):
        return {name: _numbers(item) for name, item in value.items()}
    return math.nan if value is None else value
