"""Shelf: the baselines under one folder, the files that cannot serve, and the one case that somebody names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from pytest_llmperf.cli.answer import CaseError, NotStoredError
from pytest_llmperf.judge import store
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.batch_size_baseline import CapacityBaseline
from pytest_llmperf.judge.loss_curves import LOSS_CURVES, CurveBaseline
from pytest_llmperf.judge.store import CAPACITY, BaselineStore
from pytest_llmperf.records.metrics import METRICS, formatted, measured
from pytest_llmperf.report.text import one_line
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.folders import baselines_above
from pytest_llmperf.support.suggestions import nearest

# Fewer digits of a digest are as likely a word.
_FEWEST_DIGITS = 6
_DIGEST = re.compile(rf"[0-9a-f]{{{_FEWEST_DIGITS},16}}")

# What a field of the wrong type or size raises where something is computed from it.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Stored:
    """A baseline and its file."""

    path: Path
    baseline: Baseline


@dataclass(frozen=True)
class StoredCapacity:
    """The baseline of a largest micro-batch, which holds no launches, and its file."""

    path: Path
    baseline: CapacityBaseline


_Found = TypeVar("_Found", Stored, StoredCapacity)
_Baseline = TypeVar("_Baseline", Baseline, CapacityBaseline)


@dataclass(frozen=True)
class Shelf:
    """What one folder of baselines holds."""

    root: Path
    stored: tuple[Stored, ...]
    broken: Mapping[Path, str]
    """What is wrong with each file that cannot serve, a line each."""
    capacities: tuple[StoredCapacity, ...] = ()
    """The largest micro-batches."""
    copies: Mapping[Path, Path] = field(default_factory=dict)
    """Files that somebody left beside the one of their case, which is what counts; none of them is in the others."""

    @property
    def troubles(self) -> list[str]:
        """A line for each file that cannot serve, or that is one too many."""
        spare = (
            f"{path}: a stray copy of {right}, which is the one that counts; delete it"
            for path, right in self.copies.items()
        )
        return [*self.broken.values(), *spare]

    @classmethod
    def read(cls, root: Path, machine: str | None = None) -> Shelf:
        """Everything under ``root``, or what is of ``machine`` there.

        Raises:
            CaseError: there is nothing, or nothing of that machine kind.
        """
        machines = BaselineStore(root).machines()
        if not machines:
            found = baselines_above(root.absolute())
            what = "name their folder with --perf-baselines, or record some with pytest --update-baselines=new"
            raise NotStoredError(
                f"{root.absolute()}: no baselines here, expected MACHINE/MODEL/ID.json in it; "
                + (f"{found} has some: name it with --perf-baselines" if found else what)
            )
        if machine is not None and machine not in machines:
            raise CaseError(
                f"{machine}: {root} has no baselines of this machine kind, expected one of {', '.join(machines)}; "
                f"the nearest is {nearest(machine, machines, at_least=0.0)!r}: name it with --machine"
            )
        kinds = machines if machine is None else [machine]
        broken: dict[Path, str] = {}
        stored = [*_each(root, kinds, "*/*.json", read, broken)]
        capacities = [*_each(root, kinds, f"*/{CAPACITY}/*.json", read_capacity, broken)]
        every: tuple[Stored | StoredCapacity, ...] = (*stored, *capacities)
        copies = BaselineStore(root).copies({one.path: one.baseline for one in every})
        return cls(
            root,
            tuple(one for one in stored if one.path not in copies),
            broken,
            tuple(one for one in capacities if one.path not in copies),
            copies,
        )

    def find(self, case: str) -> Stored | StoredCapacity:
        """The one baseline with this id or digest.

        Raises:
            BaselineError: the file of that name cannot serve.
            CaseError: none, or several.
        """
        unreadable = [line for path, line in self.broken.items() if path.stem == case]
        if unreadable:
            raise BaselineError("\n".join(unreadable))
        every: tuple[Stored | StoredCapacity, ...] = (*self.stored, *self.capacities)
        found = [one for one in every if one.baseline.id == case]
        if not found and _DIGEST.fullmatch(case):
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


def _each(
    root: Path, machines: Sequence[str], pattern: str, reader: Callable[[Path], _Found], broken: dict[Path, str]
) -> Iterator[_Found]:
    """What is stored of these machines; what cannot serve goes to ``broken``."""
    for machine, path in ((kind, path) for kind in machines for path in sorted((root / kind).glob(pattern))):
        try:
            found = reader(path)
            if found.baseline.machine != machine:
                raise BaselineError(
                    f"{path}: it is of machine {found.baseline.machine}, expected {machine}; "
                    "move it where it belongs, or delete it and record anew with --update-baselines=new"
                )
        except BaselineError as error:
            broken[path] = str(error)
        else:
            yield found


def find(case: str, root: Path, machine: str | None) -> Stored:
    """The baseline of launches that ``case`` names.

    Raises:
        BaselineError: its file cannot serve.
        CaseError: as ``find_any``, or what it names is a largest micro-batch.
    """
    found = find_any(case, root, machine)
    if isinstance(found, StoredCapacity):
        raise CaseError(
            f"{case}: a largest micro-batch, which has no launches, expected a case that has; "
            "llmperf baselines show tells what is stored of it"
        )
    return found


def find_any(case: str, root: Path, machine: str | None) -> Stored | StoredCapacity:
    """The baseline that ``case`` names: a file, or an id or digest under ``root``.

    Raises:
        BaselineError: its file cannot serve.
        CaseError: as ``Shelf.read`` and ``Shelf.find``.
    """
    # An id has neither. A file is read alone, whatever is wrong with its neighbours.
    is_path = os.sep in case or case.endswith(".json")
    path = Path(case)
    if not is_path or not path.exists():
        return Shelf.read(root, machine).find(case)
    return read_capacity(path) if path.absolute().parent.name == CAPACITY else read(path)


def read(path: Path) -> Stored:
    """The baseline in this file; everything that is shown can be computed from it.

    Raises:
        BaselineError: it cannot be read, or cannot serve.
    """
    baseline = _there(path, store.read(path, Baseline))
    try:
        for launch in baseline.launches:
            launch.differences(baseline.launches[-1])
        for metric in measured().values():
            metric.read(baseline.launches)
        _ = baseline.sessions
    except _MALFORMED as error:
        raise BaselineError(
            f"{path}: a field has a value that cannot be computed with ({error}); "
            "restore it from version control, or delete it and record anew with --update-baselines=new"
        ) from error
    return Stored(path, baseline)


def read_capacity(path: Path) -> StoredCapacity:
    """The largest micro-batch in this file.

    Raises:
        BaselineError: it cannot be read, or cannot serve.
    """
    return StoredCapacity(path, _there(path, store.read(path, CapacityBaseline)))


def _there(path: Path, baseline: _Baseline | None) -> _Baseline:
    if baseline is None:
        raise BaselineError(f"{path}: it is gone; look again")
    return baseline


# Figures of stored baselines, as commands show them.


def by_machine(stored: Iterable[Stored]) -> list[tuple[str, list[Stored]]]:
    """Machine kinds and their baselines, both sorted."""
    ordered = sorted(stored, key=lambda one: (one.baseline.machine, one.baseline.id))
    return [(machine, list(group)) for machine, group in groupby(ordered, key=lambda one: one.baseline.machine)]


def figure(baseline: Baseline, metric: str) -> float:
    """A metric of all launches of ``baseline``, as a verdict is held against them."""
    return METRICS[metric].read(baseline.launches)


def shown(metric: str, value: float | None) -> str:
    """A metric's value for people."""
    return formatted(metric, value, METRICS[metric].unit)


def change(value: float | None, reference: float | None) -> float | None:
    """As a fraction; ``None`` where there is nothing to compare."""
    return value / reference - 1 if value is not None and reference else None


def spec_defaults() -> dict[str, Any]:
    """TrainSpec's settings that have a default."""
    return {one.name: one.default for one in fields(TrainSpec) if one.default is not MISSING}


def settings_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """``name: A's -> B's``, sorted; a setting that an older version did not store has its default."""
    defaults = spec_defaults()
    mine, theirs = {**defaults, **a}, {**defaults, **b}
    names = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    return [one_line(f"{name}: {mine.get(name)} -> {theirs.get(name)}") for name in names]


# Loss curves lie beside the baselines of the same cases, and have no machine kind.


@dataclass(frozen=True)
class CurveShelf:
    """The loss curves under one folder of baselines."""

    stored: Mapping[Path, CurveBaseline] = field(default_factory=dict)
    """By their files."""
    broken: tuple[str, ...] = ()
    """What is wrong with each file that cannot serve, a line each."""

    @classmethod
    def read(cls, root: Path, machine: str | None) -> CurveShelf:
        """Everything under ``root``; nothing where a machine kind is named, as they have none."""
        stored, broken = dict[Path, CurveBaseline](), list[str]()
        for path in sorted((root / LOSS_CURVES).glob("*.json")) if machine is None else ():
            try:
                found = store.read(path, CurveBaseline)
            except BaselineError as error:
                broken.append(str(error))
            else:
                stored |= {path: found} if found is not None else {}
        return cls(stored, tuple(broken))

    def of(self, case: str) -> CurveShelf:
        """Those with this id or digest."""
        is_digest = len(case) >= _FEWEST_DIGITS
        named = {
            path: one
            for path, one in self.stored.items()
            if one.id == case or (is_digest and one.digest.startswith(case))
        }
        return CurveShelf(named, tuple(line for line in self.broken if f"{LOSS_CURVES}/{case}.json:" in line))


def is_of_curves(case: str) -> bool:
    """Whether ``case`` is a file among loss curves."""
    path = Path(case)
    # The folder first: an id may be longer than a file's name.
    return path.absolute().parent.name == LOSS_CURVES and path.exists()


def refuse_curves(case: str) -> None:
    """Loss curves have neither launches nor a history.

    Raises:
        CaseError: ``case`` is a file of loss curves.
    """
    if is_of_curves(case):
        raise CaseError(
            f"{case}: loss curves, which have no launches and no history, expected a baseline that has; "
            "llmperf baselines show tells what is stored of them"
        )
