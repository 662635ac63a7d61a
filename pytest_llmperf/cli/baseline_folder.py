"""Shelf: the baselines under one folder, the files that cannot serve, and the one case that somebody names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_llmperf.cli.answer import DIGEST, CaseError, NotStoredError
from pytest_llmperf.judge import store
from pytest_llmperf.judge.baseline import CAPACITY, Baseline, BaselineStore, CapacityBaseline, is_named
from pytest_llmperf.records.metrics import METRICS, formatted, measured
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import baselines_above
from pytest_llmperf.support.user_input import nearest

# What a field of the wrong type or size raises where something is computed from it.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

_Kind = TypeVar("_Kind", Baseline, CapacityBaseline)


@dataclass(frozen=True)
class Stored(Generic[_Kind]):
    path: Path
    baseline: _Kind


#: Of launches, or of a largest micro-batch, which has none.
AnyStored = Stored[Baseline] | Stored[CapacityBaseline]


@dataclass(frozen=True)
class Shelf:
    root: Path
    every: Sequence[AnyStored]
    broken: Mapping[Path, str]
    """What is wrong with each file that cannot serve, a line each."""

    def of(self, kind: type[_Kind]) -> list[Stored[_Kind]]:
        return [Stored(one.path, one.baseline) for one in self.every if isinstance(one.baseline, kind)]

    @property
    def stored(self) -> list[Stored[Baseline]]:
        return self.of(Baseline)

    @property
    def troubles(self) -> list[str]:
        return [*self.broken.values()]

    @classmethod
    def read(cls, root: Path, machine: str | None = None) -> Shelf:
        """Everything under ``root``, or what is of ``machine`` there; CaseError: there is nothing."""
        if not (machines := BaselineStore(root).machines()):
            found = baselines_above(root.absolute())
            what = "name their folder with --perf-baselines, or record some with pytest --update-baselines=new"
            raise NotStoredError(
                f"{root.absolute()}: no baselines here, expected MACHINE/MODEL/ID.json in it; "
                + (f"{found} has some: name it with --perf-baselines" if found else what)
            )
        check_machine(root, machine)
        every, broken = list[AnyStored](), dict[Path, str]()
        for kind in machines if machine is None else [machine]:
            for path in sorted([*(root / kind).glob("*/*.json"), *(root / kind).glob(f"*/{CAPACITY}/*.json")]):
                _put(path, kind, every, broken)
        return cls(root, every, broken)

    def find(self, case: str) -> AnyStored:
        """The baseline with this id or digest; BaselineError: its file cannot serve; CaseError: none, or several."""
        if unreadable := [line for path, line in self.broken.items() if path.stem == case]:
            raise store.BaselineError("\n".join(unreadable))
        every: list[AnyStored] = [*self.stored, *self.of(CapacityBaseline)]
        found = [one for one in every if one.baseline.id == case]
        if not found and DIGEST.fullmatch(case):
            found = [one for one in every if one.baseline.digest.startswith(case)]
        if len(found) > 1:
            files = ", ".join(str(one.path) for one in found)
            raise CaseError(
                f"{case}: {len(found)} baselines, expected one; choose with --machine, or name a file: {files}"
            )
        if found:
            return found[0]
        expected = "expected an id, 6 digits or more of a digest, or a baseline's file"
        near = nearest(case, [one.baseline.id for one in every], at_least=0.0) if every else ""
        raise NotStoredError(
            f"{case}: no such case in {self.root}, {expected}"
            + (f"; the nearest id is {near!r}" if every else "")
            + (f"; {len(self.broken)} more cannot be read" if self.broken else "")
            + "; llmperf baselines list names them all"
        )


def check_machine(root: Path, machine: str | None) -> None:
    """Raise CaseError where nothing under ``root`` is of the ``machine`` that somebody named."""
    machines = BaselineStore(root).machines()
    if machine is not None and machine not in machines:
        near = next((one for one in machines if machine in one), "") or nearest(machine, machines, at_least=0.0)
        raise CaseError(
            f"{machine}: {root} has no baselines of this machine kind, expected one of {', '.join(machines) or 'none'}"
            + (f"; the nearest is {near!r}: name it with --machine" if near else "")
        )


def find(case: str, root: Path, machine: str | None) -> Stored[Baseline]:
    """As ``find_any``, where what is named has launches."""
    found = find_any(case, root, machine)
    if not isinstance(found.baseline, Baseline):
        told = "expected a case that has some: llmperf baselines show tells what is stored"
        raise CaseError(f"{case}: {found.baseline.noun}, without launches; {told}")
    return Stored(found.path, found.baseline)


def find_any(case: str, root: Path, machine: str | None) -> AnyStored:
    """The baseline that ``case`` names: a file, or an id or digest under ``root``; errors as of ``Shelf``."""
    # A file is read alone, whatever is wrong with its neighbours.
    return _read_any(Path(case)) if is_file(case) else Shelf.read(root, machine).find(case)


def is_file(case: str) -> bool:
    return (os.sep in case or case.endswith(".json")) and Path(case).exists()  # an id has neither


def _read_any(path: Path) -> AnyStored:
    return _read_as(path, CapacityBaseline) if path.absolute().parent.name == CAPACITY else read(path)


def _put(path: Path, machine: str, every: list[AnyStored], broken: dict[Path, str]) -> None:
    try:
        found = _read_any(path)
        if found.baseline.machine != machine:
            raise store.BaselineError(
                f"{path}: it is of machine {found.baseline.machine}, expected {machine}; "
                "move it where it belongs, or delete it and record anew with --update-baselines=new"
            )
        if not is_named(path, found.baseline):
            raise store.BaselineError(
                f"{path}: not the name of its case, {found.baseline.id}; delete it, or give it that name"
            )
        every.append(found)
    except store.BaselineError as error:
        broken[path] = str(error)


def read(path: Path) -> Stored[Baseline]:
    """The baseline in this file; all that is shown can be computed from it. BaselineError: it cannot serve."""
    stored = _read_as(path, Baseline)
    launches = stored.baseline.launches
    try:
        for launch in launches:
            launch.differences(launches[-1])
        for metric in measured(launches).values():
            metric.read(launches)
        _ = stored.baseline.sessions
    except _MALFORMED as error:
        raise store.BaselineError(
            f"{path}: a field has a value that cannot be computed with ({error}); "
            "restore it from version control, or delete it and record anew with --update-baselines=new"
        ) from error
    return stored


def _read_as(path: Path, kind: type[_Kind]) -> Stored[_Kind]:
    if (found := store.read(path, kind)) is None:
        raise store.BaselineError(f"{path}: it is gone; look again")
    return Stored(path, found)


# Figures of stored baselines, as commands show them.
def figure(baseline: Baseline, metric: str) -> float:
    """A metric of the launches of ``baseline``, all alike; a verdict weighs each by how sure it is."""
    return METRICS[metric].read(baseline.launches)


def shown(metric: str, value: float | None) -> str:
    return formatted(metric, value, METRICS[metric].unit)


def change(value: float | None, reference: float | None) -> float | None:
    """As a fraction; ``None`` where there is nothing to compare."""
    return value / reference - 1 if value is not None and reference else None


def chosen_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What names a spec: its model or command, and what is not as it is anyway."""
    kind = ScriptSpec if "command" in settings else TrainSpec
    usual: dict[str, Any] = {one.name: one.default for one in fields(kind) if one.default is not MISSING}
    usual |= {} if kind is TrainSpec else {"watch": [], "env": {}}
    return {name: value for name, value in settings.items() if name not in usual or value != usual[name]}
