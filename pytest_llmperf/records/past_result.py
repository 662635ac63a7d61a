"""PastLaunch, PastResult: as much of a case's result as its history needs; Candidate: a revision in a history."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pytest_llmperf.records.calibration import Place, host_of, site_of
from pytest_llmperf.records.trace import COUNTED, Trace
from pytest_llmperf.support.codec import Number

#: The verdict of a real run that was watched; its row's file begins with it, and holds it under this name.
OBSERVED = "observed"


@dataclass(frozen=True)
class PastLaunch:
    """One launch of it."""

    started_at: str
    """UTC, ISO 8601."""
    step_seconds: float
    """Median of the steady steps, of the slowest rank."""
    median_error: float = 0.0
    """Relative standard error of that within the launch."""
    sm_clock_mhz: Number = 0.0
    """Median while it trained; 0 where nobody told."""
    places: tuple[Place, ...] = ()
    """Of its ranks; none where nobody told."""

    @property
    def host(self) -> str:
        return host_of(self.places)

    @property
    def site(self) -> str:
        return site_of(self.places)


@dataclass(frozen=True, kw_only=True)
class PastResult:
    """One case of one run."""

    run: str
    """What its other cases share, and no other run has."""
    machine: str
    id: str
    digest: str
    nodeid: str
    verdict: str
    launches: tuple[PastLaunch, ...]
    """One at least, in the order of time."""
    tokens_per_step: int
    """Over all ranks; 0 where nobody told."""
    ranks: int
    peak_reserved_bytes: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, packages, CUDA and the driver."""
    revision: str = ""
    """The commit of the project that ran, with a ``+`` where files differed from it; empty where that is not known."""
    project: str = ""
    """Of which project it is; empty where nobody told."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What a traced step is made of, by metric; empty where it was not traced."""
    unfinished: str = ""
    """What ended its run before its end."""
    observed: Mapping[str, float] = field(default_factory=dict)
    """Of a real run that was watched: its ``steps``; from the first quarter of them to the last the ``drift`` of their
    time, as a fraction, and bytes that it ``held`` more. Empty of a measurement."""
    calibrations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of its GPUs, by device, each as its file has it; those that cannot be used are left out."""

    @property
    def began(self) -> str:
        return self.launches[0].started_at

    @property
    def step_seconds(self) -> float:
        """The step time of its launches together, where +5 % and -5 % weigh the same."""
        return math.exp(fmean(math.log(launch.step_seconds) for launch in self.launches))

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """``None`` where its tokens were not told."""
        return self.tokens_per_step / self.ranks / self.step_seconds if self.tokens_per_step else None

    @property
    def measurement(self) -> tuple[object, ...]:
        """Which one it is, in whatever file it was found."""
        return self.machine, self.digest, *((launch.started_at, launch.site) for launch in self.launches)


def counts_of(trace: Trace) -> dict[str, float]:
    """What a traced step is made of, by metric: a host's operators, or a device's kernels."""
    other = "kernels_per_step" if trace.is_on_host else "operators_per_step"
    return {name: trace.count(name) for name in COUNTED if trace and name != other}


@dataclass(frozen=True)
class Candidate:
    """One of a history; its good end has no parents there."""

    name: str
    """What names it alone: a commit's full hash, or a version."""
    parents: tuple[str, ...] = ()
    """Names of those that it follows; some may be before the history's beginning."""
    subject: str = ""
    """Of the commit; empty of a version."""
    author: str = ""
    date: str = ""
    is_commit: bool = False

    @property
    def shown(self) -> str:
        """As people call it."""
        return self.name[:12] if self.is_commit else self.name

    @property
    def told(self) -> str:
        """The same with what a reader recognises it by."""
        who = ", ".join(filter(None, [self.author, self.date]))
        return " ".join(filter(None, [self.shown, self.subject, f"({who})" if who else ""]))
