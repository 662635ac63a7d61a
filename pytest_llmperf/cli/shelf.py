"""Shelf: the baselines under one folder, the files that cannot serve, and the one case that somebody names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.capacity import CapacityBaseline
from pytest_llmperf.judge.document import BaselineError
from pytest_llmperf.judge.policy import METRICS
from pytest_llmperf.judge.store import CAPACITY, BaselineStore
from pytest_llmperf.nearest import nearest

# Fewer digits of a digest are as likely a word.
_DIGEST = re.compile(r"[0-9a-f]{6,16}")

# What a field of the wrong type or size raises where something is computed from it.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class CaseError(Exception):
    """No baselines, or no such case: one line with who, what was expected, the nearest known name and what to do."""


@dataclass(frozen=True)
class Stored:
    """A baseline and its file."""

    path: Path
    baseline: Baseline


@dataclass(frozen=True)
class Shelf:
    """What one folder of baselines holds."""

    root: Path
    stored: tuple[Stored, ...]
    broken: Mapping[Path, str]
    """What is wrong with each file that cannot serve, a line each."""
    capacities: tuple[CapacityBaseline, ...] = ()
    """The largest micro-batches."""

    @classmethod
    def read(cls, root: Path, machine: str | None = None) -> Shelf:
        """Everything under ``root``, or what is of ``machine`` there.

        Raises:
            CaseError: there is nothing, or nothing of that machine kind.
        """
        machines = BaselineStore(root).machines()
        if not machines:
            raise CaseError(
                f"{root.absolute()}: no baselines here, expected MACHINE/MODEL/ID.json in it; name their folder with "
                "--perf-baselines, or record some with pytest --update-baselines=new"
            )
        if machine is not None and machine not in machines:
            raise CaseError(
                f"{machine}: {root} has no baselines of this machine kind, expected one of {', '.join(machines)}; "
                f"the nearest is {nearest(machine, machines, at_least=0.0)!r}: name it with --machine"
            )
        stored, capacities, broken = [], [], {}
        for kind in machines if machine is None else [machine]:
            for path in sorted((root / kind).glob("*/*.json")):
                try:
                    stored.append(_in_its_place(read(path), kind))
                except BaselineError as error:
                    broken[path] = str(error)
            for path in sorted((root / kind).glob(f"*/{CAPACITY}/*.json")):
                try:
                    capacities.append(CapacityBaseline.from_json(path.read_text(encoding="utf-8"), str(path)))
                except (BaselineError, OSError, UnicodeDecodeError) as error:
                    broken[path] = str(error)
        return cls(root, tuple(stored), broken, tuple(capacities))

    def find(self, case: str) -> Stored:
        """The one baseline with this id or digest.

        Raises:
            BaselineError: the file of that name cannot serve.
            CaseError: none, or several.
        """
        unreadable = [line for path, line in self.broken.items() if path.stem == case]
        if unreadable:
            raise BaselineError("\n".join(unreadable))
        found = [one for one in self.stored if one.baseline.id == case]
        if not found and _DIGEST.fullmatch(case):
            found = [one for one in self.stored if one.baseline.digest.startswith(case)]
        if not found:
            raise CaseError(self._no_such(case))
        if len(found) > 1:
            files = ", ".join(str(one.path) for one in found)
            raise CaseError(
                f"{case}: {len(found)} baselines, expected one; choose with --machine, or name a file: {files}"
            )
        return found[0]

    def _no_such(self, case: str) -> str:
        line = (
            f"{case}: no such case in {self.root}, expected an id, 6 digits or more of a digest, or a baseline's file"
        )
        if self.stored:
            line += f"; the nearest id is {nearest(case, [one.baseline.id for one in self.stored], at_least=0.0)!r}"
        if self.broken:
            line += f"; {len(self.broken)} more cannot be read"
        return f"{line}; llmperf baselines list names them all"


def find(case: str, root: Path, machine: str | None) -> Stored:
    """The baseline that ``case`` names: a file, or an id or digest under ``root``.

    Raises:
        BaselineError: its file cannot serve.
        CaseError: as ``Shelf.read`` and ``Shelf.find``.
    """
    # An id has neither. A file is read alone, whatever is wrong with its neighbours.
    is_path = os.sep in case or case.endswith(".json")
    path = Path(case)
    return read(path) if is_path and path.exists() else Shelf.read(root, machine).find(case)


def read(path: Path) -> Stored:
    """The baseline in this file, of which everything that is shown can be computed.

    Raises:
        BaselineError: it cannot be read, or cannot serve.
    """
    try:
        baseline = Baseline.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BaselineError(f"{path}: cannot be read ({error})") from error
    except ArithmeticError as error:
        raise _malformed(path, error) from error
    try:
        for launch in baseline.launches:
            launch.differences(baseline.launches[-1])
        for metric in METRICS.values():
            metric.of(baseline.launches)
        _ = baseline.sessions
    except _MALFORMED as error:
        raise _malformed(path, error) from error
    return Stored(path, baseline)


def _malformed(path: Path, error: Exception) -> BaselineError:
    return BaselineError(
        f"{path}: a field has a value that cannot be computed with ({error}); "
        "restore it from version control, or delete it and record anew with --update-baselines=new"
    )


def _in_its_place(stored: Stored, machine: str) -> Stored:
    if stored.baseline.machine != machine:
        raise BaselineError(
            f"{stored.path}: it is of machine {stored.baseline.machine}, expected {machine}; "
            "move it where it belongs, or delete it and record anew with --update-baselines=new"
        )
    return stored
