"""StaticStep: what fake tensors tell of a step before anything is launched, with which versions; and its JSON.

The same for a spec on every machine: nothing of it was measured, so nothing of it has noise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIELDS = ("operators", "flops", "memory", "versions")


@dataclass(frozen=True, kw_only=True)
class StaticStep:
    """One step of one rank."""

    operators: Mapping[str, int]
    """How often each is called, without the names of overloads; kernels of Liger's as ``liger::…``."""
    flops: Mapping[str, int]
    """By operator."""
    memory: Mapping[str, int]
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, a line each in a sorted file, and a sum: nobody edits a count by hand unseen."""
        return {name: dict(getattr(self, name)) for name in _FIELDS} | {"sum": self._sum}

    @classmethod
    def from_dict(cls, values: object) -> StaticStep:
        """As ``to_dict`` wrote it.

        Raises:
            ValueError: it was not, or it was edited since.
        """
        wanted = {*_FIELDS, "sum"}
        if not isinstance(values, Mapping) or set(values) != wanted:
            has = ", ".join(sorted(values)) if isinstance(values, Mapping) else "no fields"
            raise ValueError(f"its static figures have {has}; expected {', '.join(sorted(wanted))}")
        step = cls(
            **{name: _counts(name, values[name]) for name in _FIELDS[:-1]},
            versions={str(name): str(version) for name, version in _object("versions", values["versions"]).items()},
        )
        if values["sum"] != step._sum:
            raise ValueError("its static figures were edited: they do not have the sum that was written with them")
        return step

    @property
    def _sum(self) -> str:
        exact = [sorted(getattr(self, name).items()) for name in _FIELDS]
        return hashlib.sha256(json.dumps(exact).encode()).hexdigest()[:16]


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"the {name} of its static figures are no object")
    return value


def _counts(name: str, values: object) -> dict[str, int]:
    found = {}
    for key, count in _object(name, values).items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} of its static figures: {key} is {count!r}, expected a whole number")
        found[str(key)] = count
    return found
