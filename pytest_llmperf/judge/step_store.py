"""StepStore: where a case's static figures are: in its baselines of every machine kind, or in a file of their own.

That is ``<root>/static/<spec id>.json``, for a case that nobody has launched. I/O through ``judge.store``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import BaselineChangedError, BaselineError
from pytest_llmperf.judge.store import BaselineStore, Store, file_name, read
from pytest_llmperf.judge.stored_step import ANY_MACHINE, StepBaseline, StoredStep
from pytest_llmperf.settings.train_spec import TrainSpec


@dataclass(frozen=True)
class Place:
    """A file that keeps static figures of a case, or may."""

    machine: str
    """Its machine kind, or ``ANY_MACHINE``."""
    stored: StoredStep | None
    baseline: Baseline | None = None
    """Of the launches that are stored there too."""


class StepStore:
    """Under one folder."""

    def __init__(self, root: Path, machine: str = "") -> None:
        """``machine`` is the only kind that is looked at, where it is named."""
        self._machine, self._baselines, self._alone = machine, BaselineStore(root), Store(root, StepBaseline)

    def places(self, spec: TrainSpec) -> list[Place]:
        """Those that are there, the machine kinds' first.

        Raises:
            BaselineError: one of them cannot serve.
        """
        kinds = [self._machine] if self._machine else self._baselines.machines()
        found = ((kind, self._baselines.load(kind, spec)) for kind in kinds)
        places = [Place(kind, baseline.static, baseline) for kind, baseline in found if baseline is not None]
        alone = self._alone.load(ANY_MACHINE, spec)
        return [*places, *([Place(ANY_MACHINE, alone.static)] if alone else [])]

    def settings(self, case: str) -> Mapping[str, Any] | None:
        """Of the spec with this id, where it has a file of its own.

        Raises:
            BaselineError: a file that cannot be read.
        """
        alone = read(self._alone.root / ANY_MACHINE / f"{file_name(case)}.json", StepBaseline)
        return alone.spec if alone else None

    def record(self, place: Place, spec: TrainSpec, new: StoredStep, recorded_by: str, *, on_cpu: bool = False) -> Path:
        """Keep ``new`` at ``place``, as it was judged there; the file.

        Raises:
            BaselineError: another run changed what is there, or it cannot be written.
        """
        if place.machine != ANY_MACHINE:
            self._baselines.update(place.machine, spec, _with(place, new))
            return self._baselines.path(place.machine, spec)
        judged = self._alone.load(ANY_MACHINE, spec)
        if (judged.static if judged else None) != place.stored:
            path = self._alone.path(ANY_MACHINE, spec)
            raise BaselineError(f"{spec.id}: another run changed {path} meanwhile; run again to be held against it")
        alone = StepBaseline(
            id=spec.id,
            digest=spec.digest,
            spec=spec.to_dict(),
            recorded_by=recorded_by,
            static=new,
            on_cpu=on_cpu,
        )
        return self._alone.replace(spec, judged, alone)


def _with(place: Place, new: StoredStep) -> Callable[[Baseline | None], Baseline]:
    def change(old: Baseline | None) -> Baseline:
        if old is None or old.static != place.stored:
            raise BaselineChangedError(place.baseline.id if place.baseline else "", old)
        return replace(old, static=new)

    return change
