"""Conflict: a baseline that two branches changed, as git's merge driver meets it, or as git's index keeps it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import BaselineError, parse
from pytest_llmperf.judge.baseline_union import united, united_capacity
from pytest_llmperf.judge.batch_size_baseline import CapacityBaseline
from pytest_llmperf.judge.curves.curve_baseline import LOSS_CURVES, CurveBaseline
from pytest_llmperf.judge.curves.curve_union import united_curves
from pytest_llmperf.judge.static.step_union import united_steps
from pytest_llmperf.judge.static.stored_step import ANY_MACHINE, StepBaseline

_SECONDS = 20

_Figures = TypeVar("_Figures", Baseline, CapacityBaseline, StepBaseline, CurveBaseline)


@dataclass(frozen=True)
class Conflict:
    """The three sides of one file."""

    name: str
    base: bytes
    """Empty where both sides began the file; whatever git made of it where there are several."""
    ours: bytes
    theirs: bytes

    @classmethod
    def of_files(cls, base: Path, ours: Path, theirs: Path, name: str) -> Conflict:
        """As git hands them to a merge driver."""
        return cls(name, base.read_bytes(), ours.read_bytes(), theirs.read_bytes())

    @classmethod
    def of_index(cls, path: Path) -> Conflict:
        """As git keeps them of a file in conflict, whatever the file itself holds by now.

        Raises:
            BaselineError: git knows of no conflict in it.
        """
        base, ours, theirs = (_stage(path, number) for number in (1, 2, 3))
        if ours is None or theirs is None:
            raise BaselineError(
                f"{path}: git has no two sides of it, expected a file that both branches changed, in a conflict that "
                "is not resolved yet; git status names those"
            )
        return cls(str(path), base or b"", ours, theirs)

    def merged(self) -> str:
        """The one file that holds what both sides accepted.

        Raises:
            BaselineError: a side cannot be read, or they cannot be one.
        """
        source = f"{self.name} (ours)"
        document = parse(_text(self.ours, source), source)
        if "launches" in document:
            return self._union(Baseline.from_json, united)
        if document.get("machine") == ANY_MACHINE:
            return self._union(StepBaseline.from_json, united_steps)
        if document.get("machine") == LOSS_CURVES:
            return self._union(CurveBaseline.from_json, united_curves)
        return self._union(CapacityBaseline.from_json, united_capacity)

    def _union(
        self,
        read: Callable[[str, str], _Figures],
        unite: Callable[[_Figures | None, _Figures, _Figures], _Figures],
    ) -> str:
        ours, theirs = (
            read(_text(side, source), source)
            for side, source in ((self.ours, f"{self.name} (ours)"), (self.theirs, f"{self.name} (theirs)"))
        )
        base = None
        with suppress(BaselineError):  # none, or a conflict of its own: branches that were merged before have several
            base = read(_text(self.base, self.name), self.name)
        merged = unite(base, ours, theirs).to_json()
        read(merged, self.name)  # what could not be judged against is no result
        return merged

    def marked(self) -> bytes:
        """Both sides as wholes: half of a baseline is none, and nothing may take this for one."""
        ours, theirs = (side if side.endswith(b"\n") else side + b"\n" for side in (self.ours, self.theirs))
        return b"".join((b"<<<<<<< ours\n", ours, b"=======\n", theirs, b">>>>>>> theirs\n"))


def drive(base: Path, ours: Path, theirs: Path, name: str) -> list[str]:
    """What git asks of a merge driver: the result in ``ours``; and why it is none, then with both sides and marks."""
    conflict = Conflict.of_files(base, ours, theirs, name)
    try:
        ours.write_text(conflict.merged(), encoding="utf-8")
    except BaselineError as error:
        ours.write_bytes(conflict.marked())
        return [str(error)]
    return []


def resolve(path: Path) -> str:
    """Write what git's index has of ``path`` as one file; a line about it.

    Raises:
        BaselineError: it cannot be; the file stays as it is.
    """
    path.write_text(Conflict.of_index(path).merged(), encoding="utf-8")
    return f"{path}: merged, look at it and git add it"


def _stage(path: Path, number: int) -> bytes | None:
    command = ["git", "-C", str(path.absolute().parent), "show", f":{number}:./{path.name}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BaselineError(f"{path}: git cannot be asked for its sides ({error})") from error
    return done.stdout if done.returncode == 0 else None


def _text(side: bytes, source: str) -> str:
    try:
        return side.decode("utf-8")
    except UnicodeDecodeError:
        raise BaselineError(f"{source}: it is not text in UTF-8; take the other side") from None
