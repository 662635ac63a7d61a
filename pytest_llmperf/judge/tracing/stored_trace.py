"""StoredTrace: the trace that a baseline keeps, of the versions with which it is exact, and its JSON. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trace import Trace

# Those of Python and numpy choose no kernel.
_IRRELEVANT = frozenset({"python", "numpy"})

# What a step does beside its kernels, by its name in the evidence.
COMPILER = ("graph_breaks", "recompilations")


@dataclass(frozen=True, kw_only=True)
class StoredTrace:
    """Of the launch that was accepted last and had one."""

    trace: Trace
    versions: Mapping[str, str]
    """Of the environment that it was traced in."""
    counts: Mapping[str, float]
    """Of what is counted elsewhere than in the trace: graph breaks, recompilations, the allocator's retries."""

    @classmethod
    def of(cls, launches: Sequence[Launch]) -> StoredTrace | None:
        """Of the newest of ``launches`` that has a trace."""
        for launch in reversed(launches):
            if launch.trace:
                return cls(trace=launch.trace, versions=launch.environment.versions, counts=other_counts(launch))
        return None

    def other_versions(self, launch: Launch) -> tuple[str, ...]:
        """What differs in the versions of ``launch``, ``name: then -> now``; its counts are news then, and no gate."""
        mine, theirs = self.versions, launch.environment.versions
        # Of a package that only one of the two knows nothing is known; without torch's version no count is exact.
        compared = sorted(({*mine} & {*theirs} - _IRRELEVANT) | {"torch"})
        told = [(name, mine.get(name, "unknown"), theirs.get(name, "unknown")) for name in compared]
        return tuple(f"{name}: {then} -> {now}" for name, then, now in told if then != now or then == "unknown")

    def to_dict(self) -> dict[str, Any]:
        """With a sum over what is exact in it: nobody edits a count by hand unseen."""
        values = {"versions": dict(self.versions), "counts": dict(self.counts), **self.trace.to_dict()}
        return {**values, "sum": _sum(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StoredTrace:
        """As ``to_dict`` wrote it.

        Raises:
            ValueError: it was not, or it was edited since.
        """
        own = ("versions", "counts", "sum")
        missing = [name for name in own if name not in values]
        if missing:
            raise ValueError(f"its trace has no {missing[0]}")
        trace = Trace.from_dict({name: value for name, value in values.items() if name not in own})
        try:
            versions = {str(name): str(version) for name, version in values["versions"].items()}
            counts = {str(name): float(count) for name, count in values["counts"].items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"its trace cannot be read ({error})") from error
        stored = cls(trace=trace, versions=versions, counts=counts)
        if values["sum"] != _sum(stored):
            raise ValueError("its trace was edited: its counts do not have the sum that was written with them")
        return stored


def other_counts(launch: Launch) -> dict[str, float]:
    """What a launch counted by other means than its trace."""
    found = {name: launch.evidence.get(name) for name in (*COMPILER, "allocator_retries")}
    # Of what is not compiled, nothing breaks.
    kept = {name: count for name, count in found.items() if isinstance(count, int) and not isinstance(count, bool)}
    return {name: float(count) for name, count in kept.items()}


def _sum(stored: StoredTrace) -> str:
    counts = sorted((kind, name, f"{count:.6g}") for (kind, name), count in stored.trace.counts.items())
    others = sorted((name, f"{count:.6g}") for name, count in stored.counts.items())
    return hashlib.sha256(json.dumps([counts, others, sorted(stored.versions.items())]).encode()).hexdigest()[:16]
