"""The loss curves under a folder of baselines: of no machine kind, and beside the baselines of the same cases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.cli.command_error import CaseError
from pytest_llmperf.judge import store
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.curves.curve_baseline import LOSS_CURVES, CurveBaseline

# As a digest is told from a word elsewhere.
_FEWEST_DIGITS = 6


@dataclass(frozen=True)
class StoredCurves:
    """The loss curves of one case, and their file."""

    path: Path
    baseline: CurveBaseline


@dataclass(frozen=True)
class CurveShelf:
    """What one folder of baselines holds of loss curves."""

    stored: tuple[StoredCurves, ...] = ()
    broken: tuple[str, ...] = ()
    """What is wrong with each file that cannot serve, a line each."""

    @classmethod
    def read(cls, root: Path, machine: str | None) -> CurveShelf:
        """Everything under ``root``; nothing where a machine kind is named, since they are of none."""
        if machine is not None:
            return cls()
        stored, broken = list[StoredCurves](), list[str]()
        for path in sorted((root / LOSS_CURVES).glob("*.json")):
            try:
                found = store.read(path, CurveBaseline.from_json)
            except BaselineError as error:
                broken.append(str(error))
            else:
                stored += [StoredCurves(path, found)] if found is not None else []
        return cls(tuple(stored), tuple(broken))

    def of(self, case: str) -> CurveShelf:
        """Those with this id or digest."""
        whole = len(case) >= _FEWEST_DIGITS
        named = [
            one for one in self.stored if one.baseline.id == case or (whole and one.baseline.digest.startswith(case))
        ]
        return CurveShelf(tuple(named), tuple(line for line in self.broken if f"{LOSS_CURVES}/{case}.json:" in line))


def is_of_curves(case: str) -> bool:
    """Whether ``case`` is a file among loss curves."""
    path = Path(case)
    # The folder first: an id may be longer than a file's name.
    return path.absolute().parent.name == LOSS_CURVES and path.exists()


def refuse_curves(case: str) -> None:
    """Of what has neither launches nor a history.

    Raises:
        CaseError: ``case`` is a file of loss curves.
    """
    if is_of_curves(case):
        raise CaseError(
            f"{case}: loss curves, which have no launches and no history, expected a baseline that has; "
            "llmperf baselines show tells what is stored of them"
        )
