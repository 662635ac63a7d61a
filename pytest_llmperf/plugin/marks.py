"""What a test's markers say of its case, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_llmperf.plugin.failed import failed
from pytest_llmperf.plugin.options import tolerance_metric
from pytest_llmperf.result import GIB, Reference


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The markers of one test."""

    rung: str
    reference: Reference | None
    tolerances: Mapping[str, float]
    """By metric."""
    oom_below_gib: float | None
    inactive: frozenset[str]

    @classmethod
    def of(cls, item: pytest.Item) -> Marks:
        """Read them; one that is misused ends the test with one line."""
        return cls(
            rung=str(_keyword(item, "rung", "number", "")),
            reference=_reference(item),
            tolerances=_tolerances(item),
            oom_below_gib=_keyword(item, "expects_oom", "below_gib", None),
            inactive=frozenset(name for mark in item.iter_markers("expects_inactive") for name in mark.args),
        )


def _keyword(item: pytest.Item, marker: str, name: str, default: Any) -> Any:
    mark = item.get_closest_marker(marker)
    if mark is None:
        return default
    if mark.args:
        return mark.args[0]
    if name not in mark.kwargs:
        raise failed(f"{item.nodeid}: marker {marker} needs {name}=…")
    return mark.kwargs[name]


def _tolerances(item: pytest.Item) -> dict[str, float]:
    found: dict[str, float] = {}
    for mark in reversed(list(item.iter_markers("perf_tolerance"))):  # the closest one wins
        try:
            found |= {tolerance_metric(word): float(value) for word, value in mark.kwargs.items()}
        except (ValueError, TypeError) as error:
            raise failed(f"{item.nodeid}: marker perf_tolerance: {error}") from None
    return found


def _reference(item: pytest.Item) -> Reference | None:
    mark = item.get_closest_marker("reference")
    if mark is None:
        return None
    gib = mark.kwargs.get("peak_reserved_gib")
    return Reference(
        source=mark.kwargs.get("source", ""),
        tokens_per_second_per_gpu=mark.kwargs.get("tokens_per_second_per_gpu"),
        peak_reserved_bytes=None if gib is None else gib * GIB,
    )
