"""A run inside a scheduler's job: what it leaves for the job's next start, and the GPU-hours that it may use.

A requeued job goes on where it was by its journal: each case's result as it is concluded. That lies on the shared file
system beside the runs, in a folder named by the job, which a requeue does not change.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.launch.site import Site
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text

_KEPT_SECONDS = 14 * 24 * 3600.0


@dataclass(frozen=True)
class _Begun:
    restarts: int
    launches: tuple[Launch, ...]


class Journal:
    """The cases that one job has concluded, and those that it has begun."""

    def __init__(self, home: Path, key: str, arguments: Sequence[str], *, resume: bool, restarts: int = 0) -> None:
        """``arguments`` are pytest's: a job may run the suite more than once, each time with others.

        Only a run that is to ``resume`` goes on with what is there.
        """
        self.folder, self._arguments, self._resume = home / key, [str(word) for word in arguments], resume
        self._restarts = restarts
        with suppress(OSError):
            for old in home.iterdir():
                with suppress(OSError):  # a stray file, or a job that another run forgets just now
                    if time.time() - max(path.stat().st_mtime for path in (old, *old.iterdir())) > _KEPT_SECONDS:
                        shutil.rmtree(old, ignore_errors=True)

    def find(self, nodeid: str, digest: str) -> Concluded | None:
        """What an earlier start concluded of a case."""
        return codec.load(Concluded, self._path(nodeid, digest)) if self._resume else None

    def keep(self, concluded: Concluded) -> str:
        """A line about what went wrong, if anything did."""
        result = concluded.result
        why = codec.keep(self._path(result.nodeid, result.digest), concluded, lasts=True)
        return f"{result.id}: not kept for a requeue ({why})" if why else ""

    def begun(self, nodeid: str, digest: str) -> tuple[Launch, ...]:
        """Launches of a case that an earlier start did not conclude."""
        found = codec.load(_Begun, self._path(nodeid, digest, "begun-")) if self._resume else None
        # This start's own are of an attempt of this test that is over.
        return () if found is None or found.restarts == self._restarts else found.launches

    def begin(self, nodeid: str, digest: str, launches: Sequence[Launch]) -> None:
        """What a case has launched decides nothing yet: all that is lost otherwise is time."""
        codec.keep(self._path(nodeid, digest, "begun-"), _Begun(self._restarts, tuple(launches)), lasts=True)

    def spent_before(self) -> float:
        """GPU-hours of this job's earlier starts; infinite where a note of one makes no sense."""
        own = f"spent-{self._restarts}.json"
        found = [_spent(path) for path in self.folder.glob("spent-*.json") if path.name != own]
        return sum(gpu_hours for gpu_hours, _ in filter(None, found))

    def noted(self) -> tuple[float, float] | None:
        """GPU-hours of this start, and until when they count; ``None`` where nothing was noted, infinite as above."""
        return _spent(self.folder / f"spent-{self._restarts}.json")

    def note(self, gpu_hours: float, until: float) -> None:
        with suppress(OSError):
            write_text(self.folder / f"spent-{self._restarts}.json", json.dumps([gpu_hours, until]))

    def _path(self, nodeid: str, digest: str, prefix: str = "") -> Path:
        what = json.dumps([nodeid, digest, self._arguments])
        return self.folder / f"{prefix}{hashlib.sha256(what.encode()).hexdigest()[:24]}.json"


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


class Job(Journal):
    """The job of this run, through its restarts."""

    def __init__(self, folder: Path, site: Site, arguments: Sequence[str], *, resume: bool) -> None:
        super().__init__(folder / "jobs", site.key, arguments, resume=resume, restarts=site.restarts)
        self._site, self._gpus, self._start = site, 0, time.time()

    def charge(self) -> None:
        """Count the GPUs of the site for as long as this process runs; a job that shrinks has other processes then."""
        self._gpus, self._start = len(self._site.machine().gpus), self._site.began()

    def budget_ends(self, gpu_hours: float | None, say: Callable[[str], None]) -> float | None:
        """In seconds since the epoch; ``None``: never."""
        if gpu_hours is None or not self._gpus:
            return None
        spent, until = self.noted() or (0.0, self._start)
        spent += self.spent_before()
        if math.isinf(spent):
            say(f"{self.folder}/spent-*.json: no number of GPU-hours; --perf-budget is taken as used up")
        return max(until, self._start) + max(0.0, gpu_hours - spent) * 3600 / self._gpus

    def keep(self, concluded: Concluded) -> str:
        """As a journal does, and what was spent so far: a node that dies tells nothing any more."""
        self.note_spent()
        return super().keep(concluded)

    def note_spent(self) -> None:
        """GPU-hours so far, idle ones too: they are what the job is charged for."""
        if self._gpus:
            (spent, until), now = self.noted() or (0.0, self._start), time.time()
            if math.isinf(spent):
                return  # the note could not be read just now, or makes no sense: nothing better is known to put there
            # From where the last note ended, whoever wrote it: processes side by side count their time once.
            self.note(spent + self._gpus * max(0.0, now - until) / 3600, max(now, until))


class NoJob(Job):
    """The job of a run that nothing starts anew: it keeps nothing, and nothing is counted."""

    def __init__(self) -> None:
        self._gpus = 0

    def charge(self) -> None: ...

    def find(self, *_: object) -> None:
        return None

    def keep(self, _: Concluded) -> str:
        return ""

    def begun(self, *_: object) -> tuple[Launch, ...]:
        return ()

    def begin(self, *_: object) -> None: ...
