"""StaticStep: what fake tensors tell of a step before anything is launched, with which versions; and its JSON.

The same for a spec on every machine: nothing of it was measured, so nothing of it has noise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pytest_llmperf.support.codec import Count, plain_fields, read_fields


@dataclass(frozen=True, kw_only=True)
class StaticStep:
    """One step of one rank."""

    operators: Mapping[str, Count]
    """How often each is called, without the names of overloads; kernels of Liger's as ``liger::…``."""
    flops: Mapping[str, Count]
    """By operator."""
    memory: Mapping[str, Count]
    """Bytes at the predicted peak, by part."""
    versions: Mapping[str, str]
    """With which it is exact."""

    @property
    def peak_bytes(self) -> int:
        """Predicted, of one rank."""
        return sum(self.memory.values())

    def other_versions(self, now: StaticStep) -> tuple[str, ...]:
        """What differs in the versions of ``now``, ``name: then -> now``."""
        names = sorted({*self.versions, *now.versions})
        both = ((name, self.versions.get(name, "none"), now.versions.get(name, "none")) for name in names)
        return tuple(f"{name}: {then} -> {there}" for name, then, there in both if then != there)

    def to_plain(self) -> dict[str, Any]:
        """With a sum: nobody edits a count by hand unseen."""
        return {**plain_fields(self), "sum": _sum(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> StaticStep:
        step = read_fields(cls, {name: value for name, value in values.items() if name != "sum"})
        if values.get("sum") != _sum(step):
            raise ValueError("its static figures were edited: they do not have the sum that was written with them")
        return step


def _sum(step: StaticStep) -> str:
    exact = [sorted(getattr(step, each.name).items()) for each in fields(step)]
    return hashlib.sha256(json.dumps(exact).encode()).hexdigest()[:16]
