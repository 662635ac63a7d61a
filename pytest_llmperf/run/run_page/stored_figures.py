"""StoredFigures: the baselines at hand when a page is made. The only I/O here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_llmperf.judge import store
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.store import BaselineError
from pytest_llmperf.records.metrics import METRICS


@dataclass(frozen=True)
class StoredFigures:
    """By machine kind and digest."""

    baselines: Mapping[tuple[str, str], Baseline] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    """A line for each file that cannot serve."""

    @classmethod
    def read(cls, root: Path, machines: Iterable[str]) -> StoredFigures:
        """Read what is stored of these machine kinds under ``root``; nothing where there is no such folder."""
        found, broken = dict[tuple[str, str], Baseline](), list[str]()
        for machine in sorted(set(machines)):
            if not machine or Path(machine).name != machine:
                continue  # a name that leads elsewhere is nobody's folder
            for path in sorted((root / machine).glob("*/*.json")):
                try:
                    baseline = store.read(path, Baseline)
                except (BaselineError, OSError) as error:
                    broken.append(str(error).splitlines()[0])
                    continue
                if baseline is not None:
                    found[machine, baseline.digest] = baseline
        return cls(found, tuple(broken))

    def get(self, machine: str, digest: str) -> Baseline | None:
        return self.baselines.get((machine, digest))

    def by_id(self, machine: str) -> dict[str, Baseline]:
        """Those of one machine kind."""
        return {one.id: one for (kind, _), one in self.baselines.items() if kind == machine}


def stored_figure(baseline: Baseline | None, metric: str) -> float | None:
    """A metric of its launches; ``None`` where there are none."""
    return None if baseline is None else METRICS[metric].read(baseline.launches)
