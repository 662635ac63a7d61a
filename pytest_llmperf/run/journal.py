"""The journal of a SLURM job: each case's result as it is concluded, so that a requeued job goes on where it was.

It lies on the shared file system beside the runs, in a folder named by the job, which a requeue does not change.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text

_KEPT_SECONDS = 14 * 24 * 3600.0


@dataclass(frozen=True)
class Kept:
    """One concluded case, and what its conclusion needs besides."""

    result: CaseResult
    held_against: str
    refused: str


@dataclass(frozen=True)
class _Begun:
    restarts: int
    launches: tuple[Launch, ...]


class Journal:
    """What one job has concluded, and what it has begun."""

    def __init__(self, home: Path, key: str, arguments: Sequence[str], *, resume: bool) -> None:
        """``arguments`` are pytest's: a job may run the suite more than once, each time with others."""
        self.folder, self._arguments, self._resume = home / key, [str(word) for word in arguments], resume
        _prune(home)

    def find(self, nodeid: str, digest: str) -> Kept | None:
        """What was concluded of this case before, where this run goes on with that; else the case runs again."""
        return codec.load(Kept, self._path(nodeid, digest)) if self._resume else None

    def keep(self, kept: Kept) -> str:
        """Write it down; a line about what went wrong, if anything did."""
        result = kept.result
        why = codec.keep(self._path(result.nodeid, result.digest), kept, lasts=True)
        return f"{result.id}: not kept for a requeue ({why})" if why else ""

    def begun(self, nodeid: str, digest: str, restarts: int) -> tuple[Launch, ...]:
        """Launches of a case that an earlier start did not conclude, where this run goes on with that."""
        found = codec.load(_Begun, self._begun_path(nodeid, digest)) if self._resume else None
        # This start's own are of an attempt of this test that is over.
        return () if found is None or found.restarts == restarts else found.launches

    def begin(self, nodeid: str, digest: str, restarts: int, launches: Sequence[Launch]) -> None:
        """Note what a case has launched, which decides nothing yet: all that is lost otherwise is time."""
        codec.keep(self._begun_path(nodeid, digest), _Begun(restarts, tuple(launches)), lasts=True)

    def spent_before(self, restarts: int) -> float:
        """GPU-hours of this job's earlier starts; infinite where a note of one makes no sense."""
        others = self.folder.glob("spent-*.json")
        found = [_spent(path) for path in others if path.name != f"spent-{restarts}.json"]
        return sum(gpu_hours for gpu_hours, _ in filter(None, found))

    def spent_in(self, restarts: int) -> tuple[float, float] | None:
        """GPU-hours of one start, and until when they count; ``None`` where nothing was noted, infinite as above."""
        return _spent(self.folder / f"spent-{restarts}.json")

    def note_spent(self, restarts: int, gpu_hours: float, until: float) -> None:
        """Of one start, so far."""
        with suppress(OSError):
            write_text(self.folder / f"spent-{restarts}.json", json.dumps([gpu_hours, until]))

    def _begun_path(self, nodeid: str, digest: str) -> Path:
        path = self._path(nodeid, digest)
        return path.with_name(f"begun-{path.name}")

    def _path(self, nodeid: str, digest: str) -> Path:
        what = json.dumps([nodeid, digest, self._arguments])
        return self.folder / f"{hashlib.sha256(what.encode()).hexdigest()[:24]}.json"


def _spent(path: Path) -> tuple[float, float] | None:
    try:
        match json.loads(path.read_text(encoding="utf-8")):
            case [int() | float() as gpu_hours, int() | float() as until] if 0 <= gpu_hours < math.inf > until >= 0:
                return float(gpu_hours), float(until)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, RecursionError):
        pass
    return math.inf, 0.0  # nobody knows what that start spent, and a budget must not grow by it


def _prune(home: Path) -> None:
    with suppress(OSError):
        for old in home.iterdir():
            with suppress(OSError):  # a stray file, or a job that another run forgets just now
                if time.time() - max(path.stat().st_mtime for path in (old, *old.iterdir())) > _KEPT_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
